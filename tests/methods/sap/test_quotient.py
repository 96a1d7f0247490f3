"""Contributing tokens as a quotient: the bound of any two tokens, exactly; the draws; the partition; what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp import TextPrivatizer
from fastdp.methods.sap import CTI, Quotient, SAPPerturbation, equal_mass_cells, informative_cells
from fastdp.ops import NoiseStream
from tests.ops.test_dchi import FALSE_ALARM, chi_square


def counted(seed, classes=2, tokens=24):
    generator = torch.Generator().manual_seed(seed)
    rates = torch.exp(1.5 * torch.randn(classes, tokens, generator=generator))
    return torch.poisson(8 * rates, generator=generator) + 1


def privatizer(seed=0, cells=4, epsilon=1.0, classes=2, **options):
    cti = CTI.from_counts(counted(seed, classes), source="public", form="quotient", cells=cells)
    table = torch.randn(24, 3, generator=torch.Generator().manual_seed(seed))
    return TextPrivatizer(table, epsilon=epsilon, cti=cti, **options)


@given(seed=st.integers(0, 10_000), cells=st.integers(2, 7), epsilon=st.floats(1e-3, 12), classes=st.integers(2, 5))
@settings(max_examples=30)
def test_any_two_tokens_differ_by_epsilon_at_most_and_by_nothing_within_a_cell(seed, cells, epsilon, classes):
    found = privatizer(seed, cells, epsilon, classes)
    laws = torch.stack([found.log_probabilities(x) for x in range(24)])
    assert torch.allclose(laws.exp().sum(1), torch.ones(24, dtype=torch.float64))
    possible = torch.isfinite(laws)
    # What may come out is the same for every token, or one outcome alone would tell.
    assert bool((possible == possible[0]).all())
    for x in range(24):
        for other in range(24):
            worst = float((laws[x] - laws[other])[possible[0]].abs().max())
            bound = found.bound(x, other)
            assert worst <= bound * (1 + 1e-9) + 1e-12
            assert bound in (0.0, epsilon)
    assert any(found.bound(0, x) == epsilon for x in range(24))


def test_draws_follow_their_law_and_know_no_label():
    found = privatizer(3, 4, 1.5, unsafe_seed=1)
    for token in (0, 7):
        law = found.log_probabilities(token).exp().numpy()
        drawn = found(torch.full((30_000, 1), token), labels=torch.arange(30_000).remainder(2))
        for label in (0, 1):
            assert chi_square(drawn[label::2].flatten(), law) > FALSE_ALARM
        assert chi_square(found(torch.full((30_000,), token)), law) > FALSE_ALARM


def information(counts, cells, epsilon):
    """Of a class and the answer for one of its tokens, by the laws of the answers."""
    found = Quotient(cells, torch.stack([(cells == c).nonzero()[0, 0] for c in cells.unique()]), epsilon)
    laws = torch.stack([found.log_probabilities(x).exp() for x in range(len(cells))])
    joint = counts.double() @ laws / counts.sum()
    return float(torch.special.xlogy(joint, joint / (joint.sum(1, keepdim=True) * joint.sum(0) + 1e-300)).sum())


@given(seed=st.integers(0, 10_000), cells=st.integers(2, 6), epsilon=st.floats(0.1, 8), classes=st.integers(2, 4))
@settings(max_examples=15)
def test_informative_cells_tell_no_less_than_cells_of_equal_mass(seed, cells, epsilon, classes):
    counts = counted(seed, classes)
    cti = CTI.from_counts(counts, source="public", form="quotient", cells=cells)
    informed = CTI.from_counts(counts, source="public", form="quotient", cells=cells, told_at=epsilon)
    assert informed.cells.unique().tolist() == list(range(cells))
    # With as many bins as tokens the search begins at the cells of equal mass.
    assert information(counts, informed.cells, epsilon) >= information(counts, cti.cells, epsilon) - 1e-9


def test_a_rare_word_that_decides_gets_a_cell_of_its_own():
    counts = torch.full((2, 50), 100.0)
    counts[:, 0] = torch.tensor([150.0, 0.0])
    even = CTI.from_counts(counts, source="public", form="quotient", cells=2)
    found = informative_cells(counts, even.importance, 2, 8.0)
    assert int((found == found[0]).sum()) == 1
    assert int((even.cells == even.cells[0]).sum()) > 20


@given(seed=st.integers(0, 10_000), cells=st.integers(2, 24), classes=st.integers(2, 4), gaps=st.booleans())
@settings(max_examples=60)
def test_cells_have_equal_mass_up_to_a_token_and_none_is_empty(seed, cells, classes, gaps):
    counts = counted(seed, classes)
    mass = counts.sum(0).double()
    if gaps:
        mass[1::5] = 0
    cells = min(cells, int((mass > 0).sum()))
    importance = torch.randn(classes, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = equal_mass_cells(importance, mass, cells)
    held = torch.bincount(found, weights=mass, minlength=cells)
    assert len(held) == cells
    assert bool((held > 0).all())
    if cells <= 4:
        # Each cut is off by half a token at most, unless a side would be left without one; there are two above one another.
        crowded = float(mass.max()) * 2 + 1
        assert float((held - mass.sum() / cells).abs().max()) <= crowded
    if classes == 2 and not gaps:
        first = equal_mass_cells(torch.stack([importance[0], -importance[0]]), mass, cells)
        order = first[importance[0].argsort(stable=True)]
        # Of two classes the cells are quantiles.
        assert bool((order.diff() >= 0).all())


def test_special_tokens_neither_move_nor_stand_for_a_cell():
    found = privatizer(special_ids=(0, 5))
    ids = torch.tensor([0, 1, 5] * 200)
    drawn = found(ids)
    assert bool((drawn[ids == 0] == 0).all())
    assert bool((drawn[ids == 5] == 5).all())
    assert not bool(torch.isin(drawn[ids == 1], torch.tensor([0, 5])).any())


def test_the_digest_follows_epsilon_and_cells():
    digests = {privatizer(epsilon=e, cells=k).digest() for e, k in ((1.0, 4), (2.0, 4), (1.0, 3))}
    assert len(digests) == 3
    assert privatizer().digest() == privatizer().digest()


def test_refusals():
    quotient = CTI.from_counts(counted(0), source="public", form="quotient")
    prior = CTI.from_counts(counted(0), source="public")
    for options, match in (
        ({"cti": quotient, "eta": 1.0}, "give epsilon, not eta"),
        ({"cti": quotient}, "give epsilon, not eta"),
        ({"cti": quotient, "epsilon": math.inf}, "must lie between"),
        ({"cti": quotient, "epsilon": 1.0, "mechanism": "laplace"}, "choose 'quotient'"),
        ({"cti": prior, "epsilon": 1.0}, "quotient"),
        ({"epsilon": 1.0}, "quotient"),
        ({"cti": prior}, "eta is missing"),
        ({"eta": 1.0, "mechanism": "quotient"}, "choose 'laplace'"),
    ):
        with pytest.raises(ValueError, match=match):
            SAPPerturbation(**options)
    with pytest.raises(ValueError, match="unit of distance"):
        privatizer().nats_per_distance()
    for cells in (1, 25, True, 2.0):
        with pytest.raises(ValueError, match="whole number from 2"):
            CTI.from_counts(counted(0), source="public", form="quotient", cells=cells)
    for options in ({"cells": 3}, {"told_at": 1.0}):
        with pytest.raises(ValueError, match="belong to form='quotient': leave them out"):
            CTI.from_counts(counted(0), source="public", **options)
    with pytest.raises(ValueError, match="must lie between"):
        CTI.from_counts(counted(0), source="public", form="quotient", told_at=99.0)
    with pytest.raises(ValueError, match="fewer cells"):
        privatizer(special_ids=range(20))
    assert privatizer().stream.reproducible is False
    assert isinstance(privatizer(unsafe_seed=2).stream, NoiseStream)
