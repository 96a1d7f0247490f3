"""PGM-EST against its likelihood."""

import numpy as np
import pytest
from scipy import optimize

from fastdp.methods.frost import estimate_magnitudes
from fastdp.methods.frost.estimate import attenuations, estimation_std
from tests.cases import cases

RATE = 0.02


def observations(noise, steps=4, partitions=7, seed=0):
    """True magnitudes and attenuations, sensitivities, and what is seen when partitions drop out."""
    rng = np.random.default_rng(seed)
    true, lam = rng.uniform(1, 5, partitions), np.array([RATE, *rng.uniform(0.02, 0.06, steps - 1)])
    deltas = rng.uniform(0.5, 1.5, steps)
    seen = lam[:, None] * true + noise * deltas[:, None] * rng.standard_normal((steps, partitions))
    for t in range(1, steps):
        seen[t:, t - 1] = np.nan
    return true, lam, deltas, seen


def likelihood(v, lam, seen, deltas):
    return float(np.nansum(((seen - lam[:, None] * v) / deltas[:, None]) ** 2))


def test_one_observation_is_divided_by_the_rate_and_nothing_by_zero():
    assert estimate_magnitudes([[0.02, 0.04]], [1.0], RATE) == pytest.approx([1.0, 2.0])
    assert estimate_magnitudes(np.zeros((3, 4)), [1.0, 1.0, 1.0], RATE).tolist() == [0.0] * 4


@cases("seed", range(3))
def test_is_the_maximum_of_the_likelihood(seed):
    _, lam, deltas, seen = observations(0.005, seed=seed)
    found = estimate_magnitudes(seen, deltas, RATE)
    at = attenuations(seen, deltas, RATE, found)

    def cost(x):
        return likelihood(x[:7], np.array([RATE, *x[7:]]), seen, deltas) * 1e4

    best = optimize.minimize(cost, np.concatenate([found, at[1:]]), method="BFGS", options={"gtol": 1e-6})
    assert cost(np.concatenate([found, at[1:]])) <= best.fun * (1 + 1e-6)


def test_standard_deviation_of_known_attenuations():
    """Lemma 6 for known lambda, where v is a weighted mean: 4,000 draws put its deviation within 5% in all but 1e-5."""
    rng = np.random.default_rng(1)
    lam, deltas, sigma = np.array([0.02, 0.05, 0.04]), np.array([1.0, 0.6, 0.8]), 1.3
    draws = lam * 2.0 + sigma * deltas * rng.standard_normal((4000, 3))
    means = (draws * lam / deltas**2).sum(1) / (lam**2 / deltas**2).sum()
    assert means.std() == pytest.approx(estimation_std(sigma, deltas, lam), rel=0.05)


@cases(
    ("observed", "sensitivities", "rate", "message"),
    [
        ([[1.0, 2.0]], [1.0, 1.0], RATE, "do not go with"),
        ([[1.0, np.nan]], [1.0], RATE, "never observed"),
        ([[1.0, 2.0]], [1.0], 0.0, "selection_rate"),
    ],
)
def test_refuses_what_does_not_fit(observed, sensitivities, rate, message):
    with pytest.raises(ValueError, match=message):
        estimate_magnitudes(observed, sensitivities, rate)
