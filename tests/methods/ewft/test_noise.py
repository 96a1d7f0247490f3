"""Schedules: the figures that are known, what the paper's epsilon really is, and DP-Forward's calibration."""

import math

import pytest
from scipy import optimize, stats

from fastdp.methods import ewft
from tests.cases import cases

PRINTED = [0.461663, 0.415841, 0.370020]
DELTA = 1e-5


@pytest.mark.parametrize(("scale", "cost"), [("2C", 26.18), ("C", 70.72)])
def test_what_the_printed_epsilon_8_is(scale, cost):
    schedule = ewft.paper(PRINTED, 8.0, DELTA, scale)
    assert schedule.epsilon() == pytest.approx(cost, rel=4e-4)
    assert any("Poisson" in flaw for flaw in schedule.flaws)
    assert any("half" in flaw for flaw in schedule.flaws) == (scale == "C")


@cases(
    ("schedule", "ratios"),
    [
        (ewft.release_once(8.0, DELTA), [2 * 0.60023]),
        (ewft.dp_forward(3, 8.0, DELTA), [2 * 1.03963] * 3),
    ],
)
def test_sound_noise_over_the_clipping_norm(schedule, ratios):
    assert list(schedule.ratios) == pytest.approx(ratios, rel=1e-4)
    assert schedule.target_epsilon * (1 - 1e-5) <= schedule.epsilon() <= schedule.target_epsilon
    assert not schedule.flaws


@cases("epsilon", [0.5, 2.0, 8.0, 20.0])
def test_dp_forward_is_the_analytic_gaussian_mechanism(epsilon):
    """Balle and Wang (ICML 2018), theorem 8, at sensitivity 2 C."""

    def excess(mu):
        normal = stats.norm.cdf
        return normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(-mu / 2 - epsilon / mu) - DELTA

    mu = optimize.brentq(excess, 1e-3, 50)
    (ratio,) = ewft.dp_forward(1, epsilon, DELTA).ratios
    assert ratio == pytest.approx(2 / mu, rel=1e-5)


def test_noise_out_of_range_is_refused():
    for ratios in ((), (-1.0,), (math.nan,), (math.inf,)):
        with pytest.raises(ValueError, match="finite noise"):
            ewft.NoiseSchedule("wrong", ratios, DELTA)
    with pytest.raises(ValueError, match="one noise level"):
        ewft.NoiseSchedule("wrong", (1.0, 2.0), DELTA, reuse=True)
    with pytest.raises(ValueError, match="choose '2C' or 'C'"):
        ewft.paper(PRINTED, 8.0, DELTA, "4C")
    assert ewft.NoiseSchedule("none", (0.0,), DELTA).epsilon() == math.inf
