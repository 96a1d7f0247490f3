"""Utility importance, eta and noised counts. The statistical test fails by chance once in 10^8 runs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats

from fastdp import accounting, ops
from fastdp.methods import sap
from fastdp.ops import NoiseStream
from fastdp.ops.grid import exact_spacing, grid
from tests.cases import cases

#: good, bad, the, zoe
COUNTS = torch.tensor([[8, 1, 20, 1], [2, 9, 20, 0]])


def test_known_figures():
    importance = sap.utility_importance(COUNTS)
    assert importance[0].tolist() == pytest.approx([1.1276, -1.5805, 0.0290, 0.7221], abs=5e-5)
    assert sap.adaptive_eta(importance, 50, 0)[0].tolist() == pytest.approx([75.54, 17.07, 50.73, 67.31], rel=2e-4)


@given(
    st.integers(2, 4).flatmap(
        lambda classes: st.lists(
            st.lists(st.integers(0, 50), min_size=5, max_size=5).filter(sum), min_size=classes, max_size=classes
        )
    )
)
@settings(max_examples=50)
def test_importance_is_the_mean_log_ratio(rows):
    counts = torch.tensor(rows)
    found = sap.utility_importance(counts)
    share = (counts + 1) / (counts + 1).sum(1, keepdim=True)
    for c in range(len(rows)):
        others = [o for o in range(len(rows)) if o != c]
        expected = torch.stack([(share[c] / share[o]).log() for o in others]).mean(0)
        assert torch.allclose(found[c], expected.double(), atol=1e-5)
    assert torch.allclose(found.sum(0), torch.zeros(5, dtype=torch.float64), atol=1e-9)
    eta = sap.adaptive_eta(found, 3.0, sap.middle_importance(found))
    assert ((eta > 0) & (eta < 6)).all()


@cases(
    ("counts", "match"),
    [
        ([[1, 2]], "two classes"),
        ([1, 2], "two classes"),
        ([[1, 2], [0, 0]], "class 1 has no tokens"),
        ([[1, -2], [1, 1]], "at least 0"),
        ([[1, math.nan], [1, 1]], "finite"),
    ],
)
def test_refused_counts(counts, match):
    with pytest.raises(ValueError, match=match):
        sap.utility_importance(torch.tensor(counts))


def test_counts_of_texts():
    counts = sap.count_tokens([[0, 0, 3], [1], [3]], [0, 1, 1], classes=2, vocabulary=4)
    assert counts.tolist() == [[2, 0, 0, 1], [0, 1, 0, 1]]
    for texts, labels, match in (([[0]], [0, 1], "labels"), ([[0]], [2], "classes"), ([[4]], [0], "vocabulary")):
        with pytest.raises(ValueError, match=match):
            sap.count_tokens(texts, labels, 2, 4)


def test_noised_counts_clip_each_text_and_cover_every_cell():
    vocabulary, multiplier, bound = 20_000, 2.0, 3.0
    texts = [[0] * 400, [1, 2]]
    counts, event = sap.noised_counts(
        texts,
        [0, 1],
        2,
        vocabulary,
        noise_multiplier=multiplier,
        max_norm=bound,
        stream=NoiseStream.unsafe_reproducible(0),
    )
    assert event == accounting.gaussian(multiplier)
    # One text, however long, moves the sum by at most the bound.
    assert abs(counts[0, 0] - bound) < 6 * multiplier * bound
    # Noise of std 6 on a grid; what is negative becomes 0. 40,000 draws, spread again over the steps of the grid.
    cells = counts.flatten()[3:].numpy()
    step, ratio = grid(multiplier * bound)
    beyond, above = cells[cells > 0], stats.norm.sf(0.5 / ratio)
    assert stats.binomtest(len(beyond), len(cells), above).pvalue > 1e-9
    spread = beyond / step + np.random.default_rng(0).random(len(beyond)) - 0.5
    assert stats.kstest(stats.norm.sf(spread / ratio) / above, "uniform").pvalue > 1e-9
    with pytest.raises(ValueError, match="above 0"):
        sap.noised_counts(texts, [0, 1], 2, 4, noise_multiplier=0, stream=NoiseStream())


def test_one_text_moves_the_counts_by_its_bound_and_no_more_among_many(monkeypatch):
    """8,000 others put counts where float32 has few numbers left between two."""
    asked = []
    monkeypatch.setattr(ops, "add_noise_", lambda counts, std, stream: asked.append(counts.double()) or counts)
    others, often = [[0, 0, 0, 0, 0, 0, 1]] * 8_000, (1, 3, 50)
    for texts in (others, *([*others, list(range(4)) * times] for times in often)):
        labels = [0] * len(texts)
        sap.noised_counts(texts, labels, 1, 4, noise_multiplier=1.0, max_norm=5.0, stream=NoiseStream())
    without, *counted = asked
    for times, counts in zip(often, counted, strict=True):
        assert min(2.0 * times, 5.0) * 0.99 < float((counts - without).norm()) <= 5.0


@cases("bound", [0.7, 1.0, 5.0])
def test_no_texts_counts_are_rounded_where_anothers_are(monkeypatch, bound):
    asked = []
    monkeypatch.setattr(ops, "add_noise_", lambda counts, std, stream: asked.append(counts) or counts)
    texts = [[0, 1, 2], [0, 0, 0, 1], [3, 4, 5, 6, 7], [1, 1, 2, 7]] * 7
    sap.noised_counts(texts, [0, 1] * 14, 2, 8, noise_multiplier=1.0, max_norm=bound, stream=NoiseStream())
    steps = asked[0].double() / exact_spacing(len(texts), bound)
    assert torch.equal(steps, steps.round())
    assert float(steps.max()) <= 2**24
