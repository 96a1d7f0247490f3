"""`calibrate`: the least noise whose certified epsilon stays within a target."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from fastdp.accounting import pld
from fastdp.accounting.accountants import Accountant, check_adjacency, check_delta, epsilon as epsilon_of
from fastdp.accounting.event_types import DpEvent
from fastdp.accounting.events import Flat, flatten, squared_ratio
from fastdp.accounting.pld import Adjacency
from fastdp.validate import number

#: Noise multipliers a search looks at.
LEAST, MOST = 1e-3, 1e5
#: Relative distance from the target at which a search ends, always on the side of more noise.
CLOSE = 2e-5
_EVALUATIONS = 100
_CERTIFICATIONS = 6
#: How epsilon usually falls with noise (d log epsilon / d log multiplier); only the first step of a search uses it.
_USUAL_SLOPE = -2.5


def calibrate(
    event_fn: Callable[[float], DpEvent],
    epsilon: float,
    delta: float,
    *,
    adjacency: Adjacency = "add_remove",
    accountant: Accountant = "pld",
    dataset_size: int | None = None,
    tolerance: float = 3e-4,
) -> float:
    """The least noise multiplier at which ``event_fn(multiplier)`` costs at most ``epsilon`` at ``delta``.

    With ``pld`` the search runs on a coarse pessimistic grid. The result is certified on the fine one:
    `epsilon(event_fn(result), delta)` is at most the target. ``epsilon=inf`` returns 0.

    Args:
        event_fn: from a noise multiplier to an event that costs less the larger it is.
        dataset_size: number of units, to warn where delta >= 1/N.
        tolerance: how far below the target epsilon the result's may lie, relatively. Raises ValueError if it is out of reach.

    >>> from fastdp.accounting import calibrate, dpsgd
    >>> round(calibrate(lambda noise: dpsgd(noise, 0.01, 1000), epsilon=2.0, delta=1e-5), 2)
    0.96
    """
    if not callable(event_fn):
        raise TypeError(f"event_fn is a {type(event_fn).__name__}: give a function from a noise multiplier to an event")
    delta = check_delta(delta)
    check_target(epsilon, delta, dataset_size)
    check_adjacency(adjacency)
    if math.isinf(epsilon):
        return 0.0
    guess = 1.0 if flatten(event_fn(1.0)).choices else _first_guess(event_fn, epsilon, delta, adjacency)
    if accountant != "pld" or flatten(event_fn(1.0)).choices:
        return least_safe(lambda z: float(epsilon_of(event_fn(z), delta, accountant, adjacency)), epsilon, guess).at
    return _by_pld(event_fn, epsilon, delta, adjacency, guess, tolerance)


def check_target(epsilon: float, delta: float, dataset_size: int | None) -> None:
    """Raise ValueError for an epsilon that is not positive; warn where delta >= 1/N."""
    number(epsilon=epsilon)
    if not epsilon > 0:
        raise ValueError(f"target epsilon is {epsilon}: it must be positive")
    if dataset_size is not None and delta >= 1 / dataset_size:
        warnings.warn(
            f"delta {delta:g} is not below 1/N = {1 / dataset_size:.3g}: it would allow publishing a whole record",
            stacklevel=3,
        )


def search_cost(flat: Flat, delta: float, adjacency: Adjacency, interval: float) -> float:
    """Pessimistic epsilon on a coarse grid, of any event."""
    if not flat.private:
        return math.inf
    return 0.0 if flat.empty else pld.search_epsilon(flat, delta, adjacency, interval)


def search_grid(epsilon: float) -> float:
    """Discretisation whose pessimism costs a search towards ``epsilon`` a few per cent at most."""
    return max(pld.FINEST, min(pld.COARSE, epsilon / 500))


def _by_pld(
    event_fn: Callable[[float], DpEvent],
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    guess: float,
    tolerance: float,
) -> float:
    grid = search_grid(epsilon)
    found = least_safe(lambda z: search_cost(flatten(event_fn(z)), delta, adjacency, grid), epsilon, guess, close=1e-3)
    if found.cost == 0:
        return found.at
    # The excess of connect-the-dots is about quadratic in the grid, so two coarse grids foretell the fine figure.
    # 1.1 is a little less than 4/3, because a figure foretold too low costs a second certification.
    half = search_cost(flatten(event_fn(found.at)), delta, adjacency, grid / 2)
    certified = found.cost - 1.1 * max(found.cost - half, 0.0)
    multiplier, best = found.at, found.at
    for _ in range(_CERTIFICATIONS):
        if certified <= 0:
            # Delta alone covers it: there is no figure to come closer to.
            break
        multiplier *= math.exp(math.log(epsilon * (1 - tolerance / 3) / certified) / found.slope)
        certified = float(epsilon_of(event_fn(multiplier), delta, "pld", adjacency))
        if certified <= epsilon:
            best = multiplier
            if certified >= epsilon * (1 - tolerance):
                break
    return best


def _first_guess(event_fn: Callable[[float], DpEvent], epsilon: float, delta: float, adjacency: Adjacency) -> float:
    """A multiplier near the answer: the Gaussian limit of sampled releases (Bu et al. 2020), capped by no sampling."""
    factor = 2 if adjacency == "replace_one" else 1

    def below(multiplier: float) -> bool:
        flat = flatten(event_fn(multiplier))
        if not flat.private:
            return False
        mu_squared = flat.mu_squared
        for q, z, count in flat.sampled:
            mu_squared += count * min(q**2 * math.expm1(min(squared_ratio(z), 700.0)), squared_ratio(z))
        return pld.gaussian_epsilon(min(factor * math.sqrt(mu_squared), 1e3), delta) <= epsilon

    low, high = math.log(LEAST), math.log(MOST)
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if below(math.exp(middle)) else (middle, high)
    return math.exp(high)


@dataclass(frozen=True)
class SearchEnd:
    """Where a search ended: the argument, its cost, and d log cost / d log argument there."""

    at: float
    cost: float
    slope: float


def least_safe(
    cost: Callable[[float], float],
    target: float,
    start: float,
    *,
    close: float = CLOSE,
    least: float = LEAST,
    most: float = MOST,
) -> SearchEnd:
    """The argument in [least, most] at which a decreasing ``cost`` is at most ``target``, and within ``close`` of it.

    The search takes secants in the logarithms of both, since an epsilon is close to a power of the noise. They stay inside
    a bracket, which is halved where they do not help. A cost below the target even at ``least`` ends there. Raises
    ValueError if it exceeds the target even at ``most``.
    """
    low: float | None = None
    high: float | None = None
    best = SearchEnd(most, math.inf, _USUAL_SLOPE)
    x = min(max(math.log(start), math.log(least)), math.log(most))
    slope, last = _USUAL_SLOPE, (math.nan, math.nan)
    for turn in range(_EVALUATIONS):
        value = cost(math.exp(x))
        f = math.log(max(value, 1e-300) / target)
        if math.isfinite(f) and math.isfinite(last[1]) and x != last[0]:
            measured = (f - last[1]) / (x - last[0])
            slope = measured if measured < 0 else slope
        last = (x, f)
        if f > 0:
            low = x
            if x >= math.log(most):
                raise ValueError(
                    f"epsilon {target:g} is out of reach: it is still {value:.4g} at noise multiplier {most:.4g}; "
                    "allow more, or release less"
                )
        else:
            high, best = x, SearchEnd(math.exp(x), value, slope)
            if -f <= close or x <= math.log(least) or (low is not None and high - low < 1e-9):
                return best
        step = 1.0 if f == math.inf else min(max((-close / 2 - f) / slope, -1.5), 1.5)
        if low is not None and high is not None:
            x = x + step
            # Halved every eighth turn too, since secants from one side alone can take very many.
            if not low < x < high or turn % 8 == 7:
                x = (low + high) / 2
        else:
            # Without a bracket, go a little further than the secant says so as to find one.
            x = min(max(x + 1.1 * step, math.log(least)), math.log(most))
    return best
