"""Schedules: EW-FT's Algorithm 1 as printed, what it really guarantees, and the sound ones."""

import math

import pytest

from fastdp import accounting
from fastdp.accounting.schedules import schedule_shape
from tests.cases import cases

SST2 = {"dataset_size": 67349, "batch_size": 32, "epochs": 3, "epsilon": 8.0, "delta": 1e-5}
PRINTED = [0.461663, 0.415841, 0.370020]


def _cost(schedule, steps):
    return accounting.epsilon(accounting.compose(*(accounting.dpsgd(z, 32 / 67349, steps) for z in schedule)), 1e-5)


def test_algorithm_1():
    found = accounting.epoch_weighted_schedule(**SST2, step_distance=2)
    assert found == pytest.approx(PRINTED, rel=1.5e-4)
    assert 8.0 - 1e-3 <= _cost(found, 2104) <= 8.0


def test_one_epoch_is_calibrated_to_epsilon_itself():
    """The printed increment divides by E - 1; 320 records make 10 batches, and the partial one of 325 is dropped."""
    for size in (320, 325):
        [found] = accounting.epoch_weighted_schedule(size, 32, 1, 2.0, 1e-5, step_distance=2)
        assert 1.999 < accounting.epsilon(accounting.dpsgd(found, 32 / size, 10), 1e-5) <= 2.0


@cases(("epochs", "step_distance"), [(2, 1), (3, 2), (4, 4), (7, 2)])
def test_shape_follows_the_pseudocode(epochs, step_distance):
    """Lines 15-26 transcribed loop by loop."""
    last, pivot = 0.31, 0.4
    small = 4 * (pivot - last) / ((epochs - 1) * (step_distance + 1))
    expected, new = [last], last
    for counter in range(1, epochs):
        if counter < epochs / 2 - 1:
            new = new + small
        else:
            new = new + step_distance * small
        expected.append(new)
    expected.reverse()
    assert schedule_shape(last, pivot, epochs, step_distance) == pytest.approx(expected, rel=1e-12)


def test_sound_figures():
    assert accounting.largest_mu(8.0, 1e-5) == pytest.approx(1.66603, abs=1e-5)
    for epsilon, once, thrice in ((8.0, 0.60023, 1.03963), (2.0, 1.9938, 3.4534), (4.0, 1.0812, 1.8726)):
        assert accounting.sound_schedule(1, epsilon, 1e-5) == pytest.approx([once], abs=1e-4)
        assert accounting.sound_schedule(3, epsilon, 1e-5) == pytest.approx([thrice] * 3, abs=1e-4)


@pytest.mark.parametrize("epochs", [1, 4])
def test_sound_schedules_cost_their_target(epochs):
    found = accounting.epsilon(
        accounting.compose(*map(accounting.gaussian, accounting.sound_schedule(epochs, 3.0, 1e-6))), 1e-6
    )
    assert 3.0 * (1 - 1e-6) <= found <= 3.0


@cases(
    ("changed", "match"),
    [
        ({"epsilon": 1.0}, "needs more than 1"),
        ({"epsilon": 0.0}, "positive"),
        ({"epsilon": math.inf}, "infinite"),
        ({"delta": 0.0}, "delta"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 70000}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"step_distance": 0}, "step_distance"),
    ],
)
def test_values_out_of_range_are_refused(changed, match):
    with pytest.raises(ValueError, match=match):
        accounting.epoch_weighted_schedule(**{**SST2, "step_distance": 2, **changed})


@cases(("epsilon", "delta", "match"), [(4.0, 0.0, "delta"), (4.0, 2.0, "delta"), (0.0, 1e-5, "positive")])
def test_the_largest_ratio_of_a_budget_that_is_none_is_refused(epsilon, delta, match):
    assert accounting.largest_mu(math.inf, 1e-5) == math.inf
    with pytest.raises(ValueError, match=match):
        accounting.largest_mu(epsilon, delta)
