"""Calibration: the result is certified, near the target, and bad targets are refused."""

import math
import warnings

import pytest
from hypothesis import given, settings, strategies as st

from fastdp import accounting
from tests.cases import cases


def _sst2(multiplier):
    return accounting.dpsgd(multiplier, 32 / 67349, 6315)


@cases("epsilon", [0.5, 3.04736])
def test_sst2_run_is_certified_and_close(epsilon):
    multiplier = accounting.calibrate(_sst2, epsilon, 1e-5)
    assert type(multiplier) is float
    assert epsilon * (1 - 5e-4) <= accounting.epsilon(_sst2(multiplier), 1e-5) <= epsilon
    if epsilon == 3.04736:
        assert multiplier == pytest.approx(0.5, rel=2e-4)


@given(
    st.floats(min_value=0.05, max_value=20.0),
    st.floats(min_value=1e-3, max_value=0.2),
    st.integers(min_value=1, max_value=300),
    st.sampled_from(["add_remove", "replace_one"]),
    st.sampled_from(["poisson", "shuffled"]),
)
@settings(max_examples=8)
def test_result_is_certified(epsilon, rate, steps, adjacency, sampling):
    def event(multiplier):
        return accounting.dpsgd(multiplier, rate, steps, sampling, 25)

    multiplier = accounting.calibrate(event, epsilon, 1e-6, adjacency=adjacency)
    found = accounting.epsilon(event(multiplier), 1e-6, adjacency=adjacency)
    assert found <= epsilon
    # Where the grid changes with the size of epsilon the figure may jump by its pessimism.
    assert found >= 0.97 * epsilon


def test_another_accountant():
    """RDP calibrates to its own bound, as papers do."""

    def event(multiplier):
        return accounting.dpsgd(multiplier, 0.02, 50)

    multiplier = accounting.calibrate(event, 2.0, 1e-5, accountant="rdp")
    assert 2.0 * (1 - 1e-4) <= accounting.epsilon(event(multiplier), 1e-5, "rdp") <= 2.0


def test_a_gaussian_is_calibrated_exactly():
    assert accounting.calibrate(accounting.gaussian, 8.0, 1e-5) == pytest.approx(1 / 1.66603, rel=1e-3)
    exact = accounting.calibrate(accounting.gaussian, 8.0, 1e-5, tolerance=1e-6)
    assert exact == pytest.approx(1 / accounting.largest_mu(8.0, 1e-5), rel=1e-6)


def test_part_of_the_event_may_be_fixed():
    def event(multiplier):
        return accounting.compose(accounting.dpsgd(multiplier, 0.02, 50), accounting.gaussian(5.0))

    multiplier = accounting.calibrate(event, 2.0, 1e-5)
    assert accounting.epsilon(event(multiplier), 1e-5) <= 2.0
    with pytest.raises(ValueError, match="out of reach"):
        accounting.calibrate(event, 0.5, 1e-5)


def test_infinite_epsilon_needs_no_noise():
    assert accounting.calibrate(_sst2, math.inf, 1e-5) == 0.0


@cases(
    ("epsilon", "delta", "match"),
    [
        *((value, 1e-5, "epsilon") for value in (0.0, -1.0, math.nan)),
        *((1.0, d, "delta") for d in (0.0, 1.0, 2.0, -1e-5)),
    ],
)
def test_a_budget_out_of_range_is_refused(epsilon, delta, match):
    with pytest.raises(ValueError, match=match):
        accounting.calibrate(_sst2, epsilon, delta)


def test_large_delta_warns():
    with pytest.warns(UserWarning, match="1/N"):
        accounting.calibrate(accounting.gaussian, 1.0, 1e-3, dataset_size=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accounting.calibrate(accounting.gaussian, 1.0, 1e-3, dataset_size=999)
