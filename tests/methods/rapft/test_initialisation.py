"""Where relevance starts."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp.methods.rapft import Initialisation, initialisation


def start(kind: str, logits: torch.Tensor, counted: torch.Tensor | None = None, **options) -> torch.Tensor:
    counted = torch.ones(logits.shape[:2], dtype=torch.bool) if counted is None else counted
    return Initialisation(kind, **options).generation(logits, counted)


def random_logits(seed: int, rows: int = 2, length: int = 4, words: int = 300, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(rows, length, words, generator=torch.Generator().manual_seed(seed))


def test_naive_is_the_softmax_of_the_counted_positions():
    logits = random_logits(0)
    counted = torch.tensor([[True, False, True, True], [False, False, True, False]])
    assert torch.equal(start("naive", logits, counted), torch.softmax(logits, -1)[counted])


def test_top_k():
    logits = random_logits(1)
    found, probabilities = start("top_k", logits, k=3), torch.softmax(logits, -1).flatten(0, 1)
    assert ((found > 0).sum(-1) == 3).all()
    assert torch.allclose(found.sum(-1), probabilities.topk(3).values.sum(-1))


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), p=st.floats(0.05, 1.0), spread=st.floats(0.01, 8))
def test_top_p_keeps_the_fewest_likeliest_that_reach_p(seed, p, spread):
    """With logits spread little, more than the first few tokens are needed, and the whole vocabulary is sorted."""
    logits = random_logits(seed, spread=spread)
    found, probabilities = start("top_p", logits, p=p), torch.softmax(logits, -1).flatten(0, 1)
    for kept, whole in zip(found, probabilities):
        size = int((kept > 0).sum())
        ordered = whole.sort(descending=True).values
        assert torch.allclose(kept.sort(descending=True).values[:size], ordered[:size])
        assert float(ordered[:size].sum()) >= p - 1e-5
        assert float(ordered[: size - 1].sum()) < p + 1e-5


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), beams=st.integers(1, 5))
def test_beam_keeps_the_tokens_of_the_likeliest_paths(seed, beams):
    logits = random_logits(seed, rows=1, length=3, words=6, spread=1.0)
    probabilities = torch.softmax(logits, -1)[0].double()
    paths = itertools.product(range(6), repeat=3)
    ranked = sorted(
        paths, key=lambda path: -float(torch.stack([probabilities[t, w] for t, w in enumerate(path)]).prod())
    )
    expected = torch.zeros(3, 6, dtype=torch.bool)
    for path in ranked[:beams]:
        expected[range(3), path] = True
    assert torch.equal(start("beam", logits, beams=beams) > 0, expected)


def test_beams_are_not_spent_on_positions_that_do_not_count():
    logits = random_logits(4, rows=2, length=5, words=9)
    counted = torch.tensor([[False, True, False, True, False], [False, False, True, False, False]])
    found = start("beam", logits, counted, beams=3)
    alone = [logits[0, [1, 3]].unsqueeze(0), logits[1, [2]].unsqueeze(0)]
    assert torch.equal(found, torch.cat([start("beam", part, beams=3) for part in alone]))


def test_one_hot_of_the_label_or_the_likeliest_class():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 1.0, 0.0]])
    assert initialisation.one_hot(logits, torch.tensor([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert initialisation.one_hot(logits, None).tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("options", [{"kind": "greedy"}, {"k": 0}, {"beams": 0}, {"p": 0.0}, {"p": 1.5}])
def test_bad_settings(options):
    with pytest.raises(ValueError):
        Initialisation(**options)
