"""Bounds of membership tests: never below what the best test does, and close to it."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fastdp.accounting import dpsgd, gaussian, membership_bound
from tests.cases import cases

NORMAL = NormalDist()


@settings(max_examples=25, deadline=None)
@given(st.floats(0.1, 4), st.floats(1e-4, 0.5))
def test_it_lies_above_the_best_test_of_a_gaussian_release_and_near_it(mu, rate):
    exact = NORMAL.cdf(NORMAL.inv_cdf(rate) + mu)
    bound = membership_bound(gaussian(1 / mu), rate)
    # The greatest excess over 4,740 settings of this range was .082, where mu is near 4 and the rate near 1e-4.
    assert exact - 1e-9 <= bound <= min(1, 1.1 * exact + 1e-3)


@cases("rate", [0.01, 0.1, 0.5])
def test_it_lies_above_what_likelihood_ratios_reach_on_sampled_steps(rate):
    # 200,000 draws on each side, so that 5 standard deviations of the measured share are .006: a false alarm in 1e6.
    steps, q, sigma, draws = 8, 0.3, 0.8, 200_000
    random = np.random.default_rng(0)

    def ratio(x):
        return np.log(1 - q + q * np.exp((x - 0.5) / sigma**2)).sum(1)

    without = random.normal(0, sigma, (draws, steps))
    within = random.normal(0, sigma, (draws, steps)) + (random.random((draws, steps)) < q)
    threshold = np.quantile(ratio(without), 1 - rate)
    reached = float((ratio(within) > threshold).mean())
    bound = membership_bound(dpsgd(sigma, q, steps), rate)
    assert reached - 0.006 <= bound <= 1.25 * reached + 0.03


def test_the_ends():
    event = dpsgd(1.0, 0.01, 100)
    assert membership_bound(event, 1.0) == 1.0
    assert membership_bound(event, 0.0) <= 1e-6
    assert membership_bound(dpsgd(0.0, 0.01, 1), 0.01) == 1.0
    rates = [membership_bound(event, r) for r in (0.001, 0.01, 0.1, 0.5, 0.9)]
    assert rates == sorted(rates)
    with pytest.raises(ValueError, match="between 0 and 1"):
        membership_bound(event, -0.1)
    assert math.isclose(membership_bound(gaussian(1e4), 0.1), 0.1, rel_tol=1e-2)
