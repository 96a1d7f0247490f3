"""What the choice of the best of a secret number of trials costs: a bound above the exact figure, and not far above."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fastdp.accounting import (
    Card,
    Gaussian,
    calibrate,
    chosen,
    compose,
    deserialise,
    dpsgd,
    epsilon,
    gaussian,
    renyi,
    serialise,
    verify,
)
from fastdp.accounting.card import digest
from fastdp.accounting.events import flatten, poisson_gaussian
from fastdp.accounting.pld import normal_mass_below
from tests.cases import cases

SHAPES = st.sampled_from([-0.5, 0.0, 0.5, 1.0, 3.0])


def generating(x, shape, stop):
    """E[x^K], in closed form."""
    inside = 1 - (1 - stop) * x
    if shape == 0:
        return np.log(inside) / math.log(stop)
    return (inside**-shape - 1) / (stop**-shape - 1)


def exact_delta(at, multiplier, shape, stop):
    """Delta at an epsilon of the best of K scores, each N(b, multiplier^2) for b of 0 or 1, by their densities.

    The best score's distribution function is E[F^K], and its density the derivative of that.
    """
    y = np.linspace(-12 * multiplier, 1 + 12 * multiplier, 100_001)
    masses = []
    for mean in (0.0, 1.0):
        masses.append(np.diff(generating(normal_mass_below((y - mean) / multiplier), shape, stop)))
    without, taking = masses
    # A grid merges outcomes, which only makes two distributions more alike: this is a lower bound of the truth.
    return max(
        np.maximum(taking - math.exp(at) * without, 0).sum(), np.maximum(without - math.exp(at) * taking, 0).sum()
    )


@settings(max_examples=25, deadline=None)
@given(shape=SHAPES, trials=st.floats(1.5, 50), multiplier=st.floats(0.5, 8), delta=st.sampled_from([1e-3, 1e-5]))
def test_the_bound_lies_above_the_exact_cost(shape, trials, multiplier, delta):
    stop = renyi.stop_for(trials, shape)
    bound = epsilon(chosen([gaussian(multiplier)], shape, stop), delta)
    assert exact_delta(bound, multiplier, shape, stop) <= delta


@given(shape=SHAPES, trials=st.floats(1.5, 30))
@settings(max_examples=10)
def test_numbers_of_trials_follow_their_distribution(shape, trials):
    stop = renyi.stop_for(trials, shape)
    assert renyi.mean_trials(shape, stop) == pytest.approx(trials, rel=1e-6)
    found = np.array([chance for chance, _ in zip(renyi.trial_probabilities(shape, stop), range(60_000))])
    assert found.sum() == pytest.approx(1, abs=1e-6)
    assert (found * np.arange(1, len(found) + 1)).sum() == pytest.approx(trials, rel=1e-3)
    for x in (0.3, 0.9):
        powers = x ** np.arange(1, len(found) + 1)
        assert (found * powers).sum() == pytest.approx(generating(x, shape, stop), rel=1e-6)
    edges = np.cumsum(found)[:5]
    for count, edge in enumerate(edges, 1):
        assert renyi.draw_trials(shape, stop, edge - 1e-9) == count
        assert renyi.draw_trials(shape, stop, edge + 1e-9) == count + 1


@cases("event", [gaussian(1.3), dpsgd(0.8, 0.05, 200), dpsgd(2.0, 0.5, 3)])
def test_renyi_bounds_lie_above_the_certified_ones(event):
    found = renyi.renyi_epsilon(flatten(event), 1e-5, "add_remove")
    certified = epsilon(event, 1e-5)
    assert certified <= found < 1.35 * certified


def test_moments_of_a_sampled_gaussian_are_those_of_its_densities():
    x = np.linspace(-30, 60, 400_001)
    step = x[1] - x[0]
    for rate, sigma, order in ((0.1, 1.0, 2), (0.4, 2.0, 5), (0.02, 0.7, 3)):
        null = np.exp(-(x**2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
        ratio = 1 - rate + rate * np.exp((2 * x - 1) / (2 * sigma**2))
        expected = math.log((null * ratio**order).sum() * step)
        found = order - 1
        assert renyi.sampled_moment(rate, sigma, order) * found == pytest.approx(expected, rel=1e-6)
        between = math.log((null * ratio ** (order - 0.4)).sum() * step)
        assert renyi.sampled_moment(rate, sigma, order - 0.4) * (order - 1.4) >= between


def tuned(multiplier):
    return chosen([dpsgd(multiplier, 0.1, 30), gaussian(2.0)], 0.0, renyi.stop_for(8, 0.0))


def test_a_choice_is_calibrated():
    def event(multiplier):
        return chosen([gaussian(multiplier), gaussian(2.0)], 0.0, renyi.stop_for(8, 0.0))

    sigma = calibrate(event, 8.0, 1e-5)
    assert 7.9 < epsilon(event(sigma), 1e-5) <= 8
    assert epsilon(event(sigma * 0.99), 1e-5) > 8


def test_a_card_of_a_choice_verifies_and_an_altered_one_does_not():
    event = tuned(1.0)
    assert deserialise(serialise(event)) == event
    claim = Gaussian("example", "add_remove", event, 1e-5)
    card = Card.of(claim, mechanism="tuned", noise_source={})
    assert card["epsilon"]["accountant"] == "rdp"
    assert verify(card).guarantee
    one_trial = Gaussian("example", "add_remove", event.alternatives[0], 1e-5).to_json()
    forged = Card.of(claim, mechanism="tuned", noise_source={})
    forged["epsilon"]["upper_bound"] = one_trial["epsilon"]["upper_bound"]
    forged["digest"] = digest(forged)
    assert "but its event costs" in verify(forged).reason


def test_choices_compose_with_other_releases_and_with_each_other():
    alone = epsilon(tuned(1.0), 1e-5)
    both = epsilon(compose(tuned(1.0), gaussian(3.0)), 1e-5)
    assert alone < both < alone + epsilon(gaussian(3.0), 1e-5)
    assert epsilon(compose(tuned(1.0), tuned(1.0)), 1e-5) > both


def test_what_cannot_be_accounted_for_is_refused():
    with pytest.raises(ValueError, match="choice among choices"):
        epsilon(chosen([tuned(1.0)], 0.0, 0.1), 1e-5)
    with pytest.raises(ValueError, match="replaced under sampling"):
        epsilon(tuned(1.0), 1e-5, adjacency="replace_one")
    sampled = type(poisson_gaussian(1.0, 0.1))(0.1, tuned(1.0))
    with pytest.raises(ValueError, match="or of a choice"):
        epsilon(sampled, 1e-5)
    with pytest.raises(ValueError, match="no number of trials"):
        chosen([gaussian(1.0)], -1.0, 0.5)
    with pytest.raises(ValueError, match="needs the event"):
        chosen([], 0.0, 0.5)
    assert epsilon(chosen([gaussian(0.0)], 0.0, 0.5), 1e-5) == math.inf
