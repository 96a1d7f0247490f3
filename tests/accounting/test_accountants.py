"""Epsilon by PLD, PRV and RDP: known figures, limits, and what must hold for any event."""

import copy
import math
import pickle

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from hypothesis import given, settings, strategies as st

from fastdp import accounting
from fastdp.accounting import pld
from fastdp.accounting.events import flatten
from tests.cases import cases, pairs

SST2 = accounting.dpsgd(noise_multiplier=0.5, sample_rate=32 / 67349, steps=6315)
RATE, STEPS = 256 / 42000, 821


@cases(("accountant", "expected", "room"), [("pld", 3.04736, 5e-6), ("prv", 3.058, 5e-4), ("rdp", 4.1525, 5e-5)])
def test_figures_of_each_accountant(accountant, expected, room):
    found = accounting.epsilon(SST2, 1e-5, accountant)
    assert found == pytest.approx(expected, abs=room)
    assert found.certified == (accountant == "pld")
    assert accountant != "pld" or found.interval == 1e-4


@cases(
    *pairs(
        ("adjacency", ["add_remove", "replace_one"]),
        ("rate, multiplier, count", [(0.02, 0.8, 50), (0.5, 3.0, 20), (0.001, 0.45, 7), (1.0, 4.0, 1)]),
    )
)
def test_agrees_with_dp_accounting(adjacency, rate, multiplier, count):
    """The divergences computed for all losses at once are those the library computes one by one."""
    relation = {"add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE, "replace_one": NeighboringRelation.REPLACE_ONE}[
        adjacency
    ]
    event = accounting.dpsgd(multiplier, rate, count)
    theirs = PLDAccountant(relation, value_discretization_interval=1e-3).compose(event).get_epsilon(1e-5)
    ours = pld.epsilon_at(flatten(event), 1e-5, adjacency, 1e-3)
    assert ours == pytest.approx(theirs, rel=1e-6)


@cases("delta", [1e-5, 1e-8, 1e-10])
def test_rounding_never_carries_a_composition_below_the_truth(delta):
    """Many compositions of a Gaussian have a closed form; the Fourier transform alone falls below it for small delta."""
    count, multiplier = 6315, 60.0
    flat = flatten(accounting.poisson_gaussian(multiplier, 1 - 1e-12))
    flat = type(flat)(((*flat.sampled[0][:2], count),), 0.0)
    truth = pld.gaussian_epsilon(math.sqrt(count) / multiplier, delta)
    assert pld.epsilon_at(flat, delta, "add_remove", 1e-4) >= truth * (1 - 1e-6)


def test_too_small_a_delta_for_so_many_releases_is_refused():
    with pytest.raises(ValueError, match="rounding errors"):
        accounting.epsilon(accounting.dpsgd(1.0, 0.01, 100_000), 1e-11)


@pytest.mark.parametrize(("mu", "delta", "expected"), [(1.66603, 1e-5, 8.0), (4.2165, 1e-5, 26.18)])
def test_gaussian_closed_form(mu, delta, expected):
    assert accounting.epsilon(accounting.gaussian(1 / mu), delta) == pytest.approx(expected, rel=2e-4)


def test_replacing_a_unit_doubles_the_sensitivity():
    one = accounting.epsilon(accounting.gaussian(1.5), 1e-5)
    for accountant in ("pld", "prv", "rdp"):
        replaced = accounting.epsilon(accounting.gaussian(3.0), 1e-5, accountant, "replace_one")
        added = accounting.epsilon(accounting.gaussian(1.5), 1e-5, accountant)
        assert replaced == pytest.approx(added, rel=1e-9)
    assert one == accounting.epsilon(accounting.gaussian(3.0), 1e-5, adjacency="replace_one")


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_replacing_under_sampling_is_for_pld_alone(accountant):
    with pytest.raises(ValueError, match="pld"):
        accounting.epsilon(SST2, 1e-5, accountant, "replace_one")


@cases("accountant", ["pld", "prv", "rdp"])
def test_limits(accountant):
    assert accounting.epsilon(accounting.dpsgd(0.5, 0.01, 0), 1e-5, accountant) == 0.0
    assert accounting.epsilon(accounting.dpsgd(0.0, 0.01, 5), 1e-5, accountant) == math.inf
    assert accounting.epsilon(dp_event.NonPrivateDpEvent(), 1e-5, accountant) == math.inf


@cases("multiplier", [1e-320, 1e-9, 1e-3, 0.06])
def test_very_small_multipliers_end_in_a_bound(multiplier):
    """prv_accountant overflows at .05-.08 and would fill memory below; a bound may be loose but not low."""
    event = accounting.dpsgd(multiplier, 0.001, 1000)
    certified = accounting.epsilon(event, 1e-5)
    assert certified > 50
    assert accounting.epsilon(event, 1e-5, "prv") >= certified * (1 - 1e-3)


def test_small_epsilon_is_certified_on_a_finer_grid():
    found = accounting.epsilon(accounting.dpsgd(10.0, 0.001, 1000), 1e-5)
    assert found.interval == 1e-5
    assert 0.0067 < found < 0.0080


def test_memory_stays_capped_where_losses_are_wide():
    """100,000 steps at a small multiplier would ask for a grid of hundreds of millions of points at 1e-4."""
    flat = flatten(accounting.dpsgd(0.2, 0.001, 100_000))
    grid = pld.certifying_interval(flat, 100.0, "add_remove")
    assert max(losses.masses.size for losses in pld.distributions(flat, "add_remove", grid)) <= 1.1 * 4_000_000


@cases("delta", [0.0, 1.0, -1e-5, math.nan, 1e-13])
def test_delta_out_of_range_is_refused(delta):
    with pytest.raises(ValueError, match="delta"):
        accounting.epsilon(SST2, delta)


def test_unknown_accountant_and_adjacency_are_refused():
    with pytest.raises(ValueError, match="accountant"):
        accounting.epsilon(SST2, 1e-5, "gdp")
    with pytest.raises(ValueError, match="adjacency"):
        accounting.epsilon(SST2, 1e-5, adjacency="swap")


def test_an_epsilon_survives_copies_with_its_origin():
    found = accounting.epsilon(accounting.gaussian(1.0), 1e-5)
    for twin in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert twin == found
        assert (twin.accountant, twin.delta, twin.adjacency) == ("pld", 1e-5, "add_remove")


@given(st.floats(min_value=0.05, max_value=20.0), st.sampled_from([1e-3, 1e-5, 1e-9]))
@settings(max_examples=50)
def test_the_closed_form_meets_its_delta(mu, delta):
    found = pld.gaussian_epsilon(mu, delta)
    assert pld.gaussian_delta(mu, found) <= delta
    assert found == 0 or pld.gaussian_delta(mu, found * (1 - 1e-7)) > delta * (1 - 1e-4)
