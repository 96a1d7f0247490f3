"""Noise multipliers epoch by epoch: EW-FT's Algorithm 1 as printed, and schedules whose guarantee holds.

The paper (Zhang et al., Sci China Inf Sci 69, 142106, section 5.2) accounts its release as if each batch were a secret
Poisson sample. Its server sees who sends what, so sampling amplifies nothing: `epoch_weighted_schedule` reproduces the
paper and guarantees far less than its epsilon. `sound_schedule` is what to use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastdp.accounting import pld
from fastdp.accounting.accountants import check_delta, epsilon as epsilon_of
from fastdp.accounting.calibration import calibrate, check_target, least_safe, search_cost
from fastdp.accounting.event_types import DpEvent
from fastdp.accounting.events import EventModel, compose, flatten, poisson_gaussian
from fastdp.validate import integer, positive

#: Algorithm 1 stops within this distance of the target; here always on its safe side.
_TOLERANCE = 1e-4


def epoch_weighted_schedule(
    dataset_size: int, batch_size: int, epochs: int, epsilon: float, delta: float, step_distance: float
) -> list[float]:
    """Noise multipliers of epochs 1 to E, falling, by Algorithm 1 (EWPBA).

    A pivot is calibrated to ``epsilon - 1`` (lines 1-12). The last epoch's multiplier is then lowered, and the earlier ones
    raised from it, until the whole costs ``epsilon`` (lines 13-33). Releases are accounted as Poisson-sampled at rate
    batch_size / dataset_size. PLD takes the place of the paper's PRV estimate: the result's upper bound is at most
    ``epsilon``. One epoch is calibrated to ``epsilon`` itself, where the printed increment divides by zero.

    Epochs count from 1 and a partial batch is dropped, as in the pseudocode; the paper's text has other readings.

    Args:
        epsilon: above 1 for several epochs, as the printed search has no target otherwise. Raises ValueError if it is not.
        step_distance: S, how much larger the differences between early epochs are than between late ones; positive.

    >>> from fastdp.accounting import epoch_weighted_schedule
    >>> first, second, last = epoch_weighted_schedule(1000, 100, 3, 4.0, 1e-5, step_distance=1.0)
    >>> first >= second >= last
    True
    """
    rate, steps, epochs, delta = _check(dataset_size, batch_size, epochs, epsilon, delta)
    positive(step_distance=step_distance)
    if epochs == 1:
        return [calibrate(lambda z: _schedule_event([z], rate, steps), epsilon, delta)]
    if epsilon <= 1:
        raise ValueError(f"epsilon is {epsilon}: Algorithm 1 calibrates to epsilon - 1 and needs more than 1")
    pivot = calibrate(lambda z: _schedule_event([z] * epochs, rate, steps), epsilon - 1, delta, tolerance=1e-5)

    def schedule(last: float) -> list[float]:
        return schedule_shape(last, pivot, epochs, step_distance)

    def event(last: float) -> DpEvent:
        return _schedule_event(schedule(last), rate, steps)

    def coarse(last: float) -> float:
        return search_cost(flatten(event(last)), delta, "add_remove", pld.COARSE)

    close, low, high = _TOLERANCE / epsilon / 4, pivot / 100, pivot
    found = least_safe(coarse, epsilon, 0.95 * pivot, close=close, least=low, most=high)
    # The fine grid's figure is the same fraction of the coarse one's nearby; the last word is the fine grid's.
    ratio = epsilon_of(event(found.at), delta) / found.cost
    last = least_safe(lambda z: ratio * coarse(z), epsilon, found.at, close=close, least=low, most=high).at
    return schedule(last if epsilon_of(event(last), delta) <= epsilon else found.at)


def sound_schedule(epochs: int, epsilon: float, delta: float) -> list[float]:
    """Equal noise multipliers of ``epochs`` releases of one user's record that cost ``epsilon`` in all, without sampling.

    Multipliers are of the *local sensitivity*. A record clipped to norm C may become any other, so it is 2 C, and the noise
    std of epoch i is ``2 * C * multiplier``. Several Gaussian releases are one of mu^2 = sum 1/z_i^2.
    Releasing once and reusing the release is ``epochs=1``, and the least noise.

    Args:
        epochs, epsilon, delta: how many releases, and what they cost together. Raises ValueError for values out of range.

    >>> from fastdp.accounting import compose, epsilon, gaussian, sound_schedule
    >>> 3.9 < epsilon(compose(*map(gaussian, sound_schedule(3, 4.0, 1e-5))), 1e-5) <= 4.0
    True
    """
    integer(1, epochs=epochs)
    return [math.sqrt(epochs) / largest_mu(epsilon, delta)] * epochs


def largest_mu(epsilon: float, delta: float) -> float:
    """The largest sensitivity over noise std whose Gaussian release stays within a budget; inf for an infinite epsilon.

    Args:
        epsilon, delta: the budget, as the Gaussian's own trade-off gives it (Balle and Wang 2018). Raises ValueError for an
            epsilon that is not positive, or a delta outside (0, 1).

    >>> from fastdp.accounting import epsilon, gaussian, largest_mu
    >>> 3.99 < epsilon(gaussian(1 / largest_mu(4.0, 1e-5)), 1e-5) <= 4.0
    True
    """
    delta = check_delta(delta)
    check_target(epsilon, delta, None)
    if math.isinf(epsilon):
        return math.inf
    noise = least_safe(lambda z: pld.gaussian_epsilon(1 / z, delta), epsilon, 1.0, close=1e-9, least=1e-12, most=1e12)
    return 1 / noise.at


def _check(
    dataset_size: int, batch_size: int, epochs: int, epsilon: float, delta: float
) -> tuple[float, int, int, float]:
    delta = check_delta(delta)
    integer(1, dataset_size=dataset_size, batch_size=batch_size, epochs=epochs)
    if batch_size > dataset_size:
        raise ValueError(f"batch_size is {batch_size}: it must be at most dataset_size, {dataset_size}")
    check_target(epsilon, delta, dataset_size)
    if math.isinf(epsilon):
        raise ValueError("epsilon is infinite: there is no noise to schedule")
    return batch_size / dataset_size, dataset_size // batch_size, epochs, delta


def schedule_shape(last: float, pivot: float, epochs: int, step_distance: float) -> list[float]:
    """Lines 15-26 and 34: from the last epoch's multiplier upwards, reversed."""
    small = 4 * (pivot - last) / ((epochs - 1) * (step_distance + 1))
    multipliers = [last]
    for counter in range(1, epochs):
        multipliers.append(multipliers[-1] + (small if counter < epochs / 2 - 1 else step_distance * small))
    return multipliers[::-1]


def _schedule_event(multipliers: Sequence[float], rate: float, steps: int) -> DpEvent:
    return compose(*(EventModel(poisson_gaussian(z, rate)).event(steps) for z in multipliers))
