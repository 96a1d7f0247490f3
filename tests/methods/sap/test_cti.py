"""Metric bounds of every form, exactly, on small tables; and the proof by example that the paper's form has none."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp import TextPrivatizer, accounting
from fastdp.methods.sap import CTI
from fastdp.ops import NoiseStream
from tests.cases import cases
from tests.ops.test_dchi import FALSE_ALARM, chi_square, line_law


def instance(seed, form, spread=1.0, tokens=9, width=3, classes=2):
    generator = torch.Generator().manual_seed(seed)
    table = spread * torch.randn(tokens, width, generator=generator)
    counts = torch.randint(0, 40, (classes, tokens), generator=generator) + 1
    return table, CTI.from_counts(counts, source="public", form=form, min_support=15, tilt=2.0)


@given(st.integers(0, 10_000), st.sampled_from(["prior", None]), st.floats(0.01, 30), st.floats(0.05, 5))
@settings(max_examples=30)
def test_sound_forms_keep_their_bound(seed, form, eta, spread):
    """The largest log ratio of two laws, over all pairs and classes: at most what is stated, in nats and by distance."""
    table, cti = instance(seed, form or "prior", spread)
    privatizer = TextPrivatizer(table, eta=eta, mechanism="exponential", cti=None if form is None else cti)
    stated, rows = privatizer.nats_per_distance(), table.double()
    assert eta / 2 * (1 - 1e-9) <= stated <= eta * (1 + 1e-9)
    distance = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    for label in (None, 0, 1):
        laws = torch.stack([privatizer.log_probabilities(x, label) for x in range(len(table))])
        assert torch.allclose(laws.exp().sum(1), torch.ones(len(table), dtype=torch.float64))
        for x in range(len(table)):
            for other in range(x):
                worst = float((laws[x] - laws[other]).abs().max())
                assert worst <= privatizer.bound(x, other, label) * (1 + 1e-9) + 1e-9
                assert worst <= stated * float(distance[x, other]) * (1 + 1e-5) + 1e-6
    statement = privatizer.statement()
    assert statement["nats_per_distance"] == stated
    assert statement["budget"]["of_a_unit"] == stated
    assert accounting.verify(statement).guarantee


def test_the_papers_form_is_what_the_privatizer_draws():
    """The etas of that example come out of equation (6), and the tokens follow their law."""
    points = np.array([0.0, 0.01, 1.0])
    table = torch.tensor(points, dtype=torch.float32)[:, None]
    importance = torch.tensor([[1.5, -1.5, 0.0]] * 2, dtype=torch.float64)
    cti = CTI(importance, torch.ones(3, dtype=torch.bool), "private", "paper")
    privatizer = TextPrivatizer(table, eta=4.0, cti=cti, unsafe_seed=5)
    etas = cti.eta_of(None, 4.0)
    assert etas.tolist() == pytest.approx([8 / (1 + math.exp(-1.5)), 8 / (1 + math.exp(1.5)), 4.0])
    for token in (0, 1):
        drawn = privatizer(torch.full((40_000,), token))
        assert chi_square(drawn, line_law(points, points[token], float(etas[token]))) > FALSE_ALARM
    assert privatizer.bound(0, 1) == math.inf
    statement = privatizer.statement()
    assert statement["guarantee"] == "none"
    assert len(statement["why_no_guarantee"]) == 3


def test_draws_follow_the_law_of_each_class():
    table, cti = instance(3, "prior", spread=0.5)
    privatizer = TextPrivatizer(table, eta=3.0, cti=cti, unsafe_seed=6)
    ids = torch.full((30_000, 1), 2)
    labels = torch.arange(30_000).remainder(2)
    drawn = privatizer(ids, labels=labels)
    for label in (0, 1):
        law = privatizer.log_probabilities(2, label).exp().numpy()
        assert chi_square(drawn[labels == label], law) > FALSE_ALARM
    assert chi_square(privatizer(ids), privatizer.log_probabilities(2).exp().numpy()) > FALSE_ALARM


def test_rare_tokens_of_one_class_are_not_favoured():
    """A name that one class alone has: importance .72 and eta 67 without support, at most the basic eta with it."""
    counts = torch.tensor([[8, 1, 20, 1], [2, 9, 20, 0]])
    printed = CTI.from_counts(counts, source="private", form="paper")
    # Of two classes importances are each other's negatives, so that the middle of them is 0.
    assert float(printed.eta_of(0, 50.0)[3]) == pytest.approx(67.31, abs=5e-3)
    sound = CTI.from_counts(counts, source="public", min_support=5)
    assert float(sound.importance[0, 3]) <= 0
    assert float(sound.importance[0, 0]) > 0.5


def test_private_counts_need_noise():
    counts = torch.tensor([[8, 1], [2, 9]])
    with pytest.raises(ValueError, match="noised_counts"):
        CTI.from_counts(counts, source="private")
    event = accounting.gaussian(2.0)
    cti = CTI.from_counts(counts, source=event, min_support=1)
    statement = TextPrivatizer(torch.randn(2, 3), eta=1.0, cti=cti).statement()
    assert statement.claims[1].event == event


TEXTS, LABELS = [[0, 0, 3], [1], [3]] * 20, [0, 1, 1] * 20


def of_texts(**options):
    return CTI.from_texts(TEXTS, LABELS, **{"classes": 2, "vocabulary": 4, "public": False, **options})


def test_from_texts_counts_public_ones_or_noises_private_ones():
    counts = torch.tensor([[40.0, 0, 0, 20], [0, 20, 0, 20]])
    known, expected = of_texts(public=True), CTI.from_counts(counts, source="public")
    assert torch.equal(known.importance, expected.importance)
    assert known.supported.tolist() == [True, True, False, True]
    assert known.epsilon_of_counts() == 0
    noised = of_texts(noise_multiplier=0.5, delta=1e-6, stream=NoiseStream.unsafe_reproducible(0))
    assert noised.source == accounting.gaussian(0.5)
    assert noised.epsilon_of_counts() == pytest.approx(accounting.epsilon(accounting.gaussian(0.5), 1e-6))
    assert not torch.equal(noised.importance, known.importance)
    # Noise alone must not lend support: a token of no text has some, of std 50 in each class, and nearly never 283.
    loud = of_texts(noise_multiplier=10.0, stream=NoiseStream.unsafe_reproducible(0))
    assert not loud.supported[2]
    assert of_texts(form="paper").source == "private"
    assert of_texts(form="paper").epsilon_of_counts() == math.inf
    for options, match in (
        ({}, "reveal them"),
        ({"form": "quotient"}, "reveal them"),
        ({"public": True, "noise_multiplier": 1.0}, "need no noise"),
        ({"noise_multiplier": 0.0}, "above 0"),
        ({"noise_multiplier": 1.0, "delta": 0.0}, "delta"),
    ):
        with pytest.raises(ValueError, match=match):
            of_texts(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"public": True},
        {"noise_multiplier": 2.0, "delta": 1e-6},
        {"form": "paper"},
        {"form": "quotient", "cells": 2, "noise_multiplier": 0.5},
    ],
)
def test_kept_counts_come_back_as_they_were(tmp_path, options):
    made = of_texts(**options)
    made.save(tmp_path / "counts.pt")
    found = CTI.load(tmp_path / "counts.pt")
    assert torch.equal(found.importance, made.importance)
    assert torch.equal(found.supported, made.supported)
    for name in ("cells", "mass") if made.form == "quotient" else ():
        assert torch.equal(getattr(found, name), getattr(made, name))
    settings = ("source", "form", "tilt", "delta")
    assert [getattr(found, name) for name in settings] == [getattr(made, name) for name in settings]


@cases(
    ("changed", "match"),
    [
        ({"form": "other"}, "form is 'other': choose"),
        ({"source": "mine"}, "source is"),
        ({"tilt": -1.0}, "tilt"),
        ({"supported": torch.ones(4, dtype=torch.bool)}, "supported"),
        ({"importance": torch.full((2, 3), math.nan)}, "smooth"),
    ],
)
def test_refusals(changed, match):
    settings = {"importance": torch.zeros(2, 3), "supported": torch.ones(3, dtype=torch.bool), "source": "public"}
    with pytest.raises(ValueError, match=match):
        CTI(**{**settings, **changed})
    with pytest.raises(ValueError, match="not one of 2 classes"):
        CTI(**settings).importance_of(2)
