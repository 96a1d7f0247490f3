"""Upper bounds by privacy loss distributions: connect-the-dots, pessimistic, in every direction.

The method is that of `dp_accounting` (Doroshenko et al. 2022), whose figures the tests compare. Here a figure of a usual
run takes 0.04 to 0.8 seconds. There it takes 0.5 to 1.6, after an import of 1.8, and a calibration computes some ten.
"""

from __future__ import annotations

import bisect
import math
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

import fastdp._native as _native
import fastdp.accounting.renyi as renyi
from fastdp.accounting.events import MOST_KINDS, Flat, squared_ratio

Adjacency = Literal["add_remove", "replace_one", "zero_out"]
Direction = Literal["remove", "add", "replace"]

#: Discretisation of a certified figure (up to epsilon 10, then in proportion), of a small one, and of a search.
FINE, FINEST, COARSE = 1e-4, 1e-5, 1e-3
_SMALL_EPSILON = 0.05
#: Most grid points of a composed distribution: some 0.6 GB at the peak of the Fourier transform.
_MAX_POINTS = 4_000_000
#: How many times as many points a search's grid may have; with more, the closed form is the bound.
_SEARCH_FACTOR = 8
#: Widest single privacy loss worth a grid; beyond, sampling buys nothing that matters.
_MAX_RANGE = 2e4
#: Mass outside the window of a composition; it counts as infinite loss.
_TAIL = 1e-15
_ORDERS = 40
#: Most neighbouring losses that the bound of a tail takes together.
_BLOCK = 16
#: Standard deviations of noise that the window of a single release reaches to; the mass beyond, less than e^-50, counts
#: as infinite loss.
_REACH = 9.75
#: Beyond this sensitivity over noise std an epsilon (5e11) is infinite for every purpose.
_LARGEST_MU = 1e6


class _SampledGaussian:
    """A Poisson-sampled Gaussian release of sensitivity 1, seen in one direction: the pair (upper, lower) of outcomes.

    With mu the noise's distribution and mu' its shift by 1, mixed m = (1 - q) mu + q mu': removing a unit compares
    m (shifted down) with mu, adding one mu with m, replacing one m (shifted down) with m (shifted up). In each the
    privacy loss falls as the outcome x grows, so a hockey-stick divergence is a difference of two tails below one x.
    """

    def __init__(self, sigma: float, q: float, direction: Direction) -> None:
        self.sigma, self.q, self.direction = sigma, q, direction

    def bounds(self) -> tuple[float, float]:
        """The losses that outcomes within `_REACH` have, (least, greatest)."""
        tail = -_REACH * self.sigma
        low, high = (tail, 1 - tail) if self.direction == "add" else (tail - 1, -tail)
        return self._loss(high), self._loss(low)

    def _loss(self, x: float) -> float:
        removed, added = self._removal_loss(x), -self._removal_loss(-x)
        return {"remove": removed, "add": added, "replace": removed + added}[self.direction]

    def _removal_loss(self, x: float) -> float:
        loss = (-0.5 - x) / self.sigma**2
        return loss if self.q == 1 else float(np.logaddexp(math.log1p(-self.q), math.log(self.q) + loss))

    def divergence(self, epsilon: NDArray[np.float64]) -> NDArray[np.float64]:
        """Hockey-stick divergence [n] at each epsilon [n]."""
        q, variance = self.q, self.sigma**2
        deltas = np.zeros_like(epsilon)
        inside = np.ones(epsilon.shape, bool)
        if self.direction == "replace":
            x = self._replace_inverse(epsilon)
        elif self.direction == "remove":
            if q < 1:
                inside = epsilon > math.log1p(-q)
            deltas[~inside] = -np.expm1(epsilon[~inside])
            x = -0.5 - _without_sampling(epsilon[inside], q) * variance
        else:
            if q < 1:
                inside = epsilon < -math.log1p(-q)
            x = 0.5 + _without_sampling(-epsilon[inside], q) * variance
        deltas[inside] = self._upper(x) - np.exp(epsilon[inside] + self._log_lower(x))
        return np.clip(deltas, 0, 1)

    def _upper(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """The first distribution's mass at or below x."""
        if self.direction == "add":
            return normal_mass_below(x / self.sigma)
        shifted = normal_mass_below((x + 1) / self.sigma)
        return shifted if self.q == 1 else (1 - self.q) * normal_mass_below(x / self.sigma) + self.q * shifted

    def _log_lower(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Logarithm of the second distribution's mass at or below x."""
        if self.direction == "remove":
            return log_normal_mass_below(x / self.sigma)
        shifted = log_normal_mass_below((x - 1) / self.sigma)
        if self.q == 1:
            return shifted
        return np.logaddexp(math.log1p(-self.q) + log_normal_mass_below(x / self.sigma), math.log(self.q) + shifted)

    def _replace_inverse(self, epsilon: NDArray[np.float64]) -> NDArray[np.float64]:
        scale = self.sigma**2
        if self.q == 1:
            return -epsilon * scale / 2
        log_ratio = 0.5 / scale + math.log1p(-self.q) - math.log(self.q)
        half = np.abs(epsilon) / 2
        with np.errstate(divide="ignore", over="ignore"):
            log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2) + log_ratio
            # arcsinh(e^t) is log 2 + t to the last bit for t > 20, where e^t may overflow.
            arcsinh = np.where(log_sinh > 20, log_sinh + math.log(2), np.arcsinh(np.exp(np.minimum(log_sinh, 20))))
        return -np.sign(epsilon) * scale * (arcsinh + half)


def _without_sampling(loss: NDArray[np.float64], q: float) -> NDArray[np.float64]:
    """The loss l of the unsampled mechanism with log(1 - q + q e^l) = ``loss``, for losses above log(1 - q)."""
    if q == 1:
        return loss
    with np.errstate(over="ignore", divide="ignore"):
        small = np.log1p(np.expm1(np.minimum(loss, 30)) / q)
        large = loss - math.log(q) + np.log1p((q - 1) * np.exp(-np.maximum(loss, 30)))
    return np.where(loss > 30, large, small)


class LossDistribution(NamedTuple):
    """A privacy loss: ``masses`` at ``low``, ``low + 1``, ... times ``interval``, and ``infinite`` at infinity."""

    interval: float
    low: int
    masses: NDArray[np.float64]
    infinite: float

    def compose(self, other: LossDistribution) -> LossDistribution:
        """The loss of both releases: the distribution of the sum."""
        size = self.masses.size + other.masses.size - 1
        length = transform_length(size)
        masses = np.fft.irfft(np.fft.rfft(self.masses, length) * np.fft.rfft(other.masses, length), length)[:size]
        infinite = self.infinite + other.infinite - self.infinite * other.infinite
        # Without a window it grows with every release. What is cut below counts as the least loss, above as infinite.
        first, above = (int(np.searchsorted(np.cumsum(np.abs(side)), _TAIL)) for side in (masses, masses[::-1]))
        kept = masses[first : size - above].copy()
        kept[0] += masses[:first].sum()
        return LossDistribution(self.interval, self.low + other.low + first, kept, infinite + _TAIL)

    def epsilon(self, delta: float) -> float:
        """The least epsilon >= 0 whose hockey-stick divergence is at most ``delta``; inf if there is none."""
        if self.infinite > delta:
            return math.inf
        first = max(0, -self.low)
        masses = self.masses[first:]
        excess = -np.expm1(-self.interval * np.arange(masses.size + 1))

        def suffices(place: int) -> bool:
            """Whether the divergence at the loss of ``place``, where only larger losses count, is at most delta."""
            above = masses[place + 1 :]
            return self.infinite + _inner_product(excess[1 : above.size + 1], above) <= delta

        # Places count from the first loss that is not negative; epsilon 0 lies below it.
        lowest = (first + self.low) * self.interval
        if self.infinite + _inner_product(-np.expm1(-lowest - self.interval * np.arange(masses.size)), masses) <= delta:
            return 0.0
        found = bisect.bisect_left(range(masses.size - 1), True, key=suffices)
        # Between two losses the divergence is upper - e^epsilon * lower; here lower is scaled by e^loss of ``found``.
        above = masses[found:]
        upper = self.infinite + float(above.sum())
        lower = _inner_product(1 - excess[: above.size], above)
        return max(0.0, lowest + found * self.interval + math.log((upper - delta) / lower))


def normal_mass_below(x: ArrayLike) -> NDArray[np.float64]:
    """The standard normal distribution function at each of ``x``, float64 of any shape."""
    return _normal(x, logarithm=False)


def log_normal_mass_below(x: ArrayLike) -> NDArray[np.float64]:
    """Logarithm of `normal_mass_below`, exact where that underflows."""
    return _normal(x, logarithm=True)


def _normal(x: ArrayLike, logarithm: bool) -> NDArray[np.float64]:
    points = np.asarray(x, np.float64, order="C")
    out = np.empty_like(points)
    _native.normal_mass_below(points, points.size, logarithm, out)
    return out


def transform_length(least: int) -> int:
    """A length for Fourier transforms, ``least`` or up to a quarter more: a power of two times 1, 3, 5, 9 or 15."""
    shift = max(0, least.bit_length() - 4)
    return next(m << shift for m in (8, 9, 10, 12, 15, 16) if m << shift >= least)


def _inner_product(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """The inner product; unlike ``@`` in one thread, since those of a linear algebra library spin between calls."""
    return float(np.einsum("i,i->", left, right))


def _one_release(sigma: float, q: float, interval: float, direction: Direction) -> LossDistribution:
    """One release, rounded up to the grid by connecting the dots (Doroshenko et al. 2022, Algorithm 1).

    The masses at which the hockey-stick curve of the grid meets the true one in every grid point, and lies above it in
    between: with s_i = (delta_i - delta_(i+1)) / (e^h - 1) they are e^h s_(i-1) - s_i.
    """
    mechanism = _SampledGaussian(sigma, q, direction)
    least, greatest = mechanism.bounds()
    low, high = math.floor(least / interval), math.ceil(greatest / interval)
    deltas = mechanism.divergence(np.arange(low, high + 1, dtype=np.float64) * interval)
    # The curve falls; where rounding makes it rise, the larger value is the safe one.
    deltas = np.maximum.accumulate(deltas[::-1])[::-1]
    slopes = -np.diff(deltas) / math.expm1(interval)
    masses = np.empty_like(deltas)
    masses[0] = 1 - deltas[0] - slopes[0]
    masses[1:] = math.exp(interval) * slopes
    masses[1:-1] -= slopes[1:]
    return LossDistribution(interval, low, np.maximum(masses, 0), float(deltas[-1]))


def _self_compose(one: LossDistribution, times: int, most: int) -> LossDistribution | None:
    """``times`` releases, in a window of losses outside of which `_TAIL` of the mass may lie; None if it has over ``most``."""
    if times == 1:
        return one
    interval, low, masses, infinite = one
    first, last = window_end(masses, times, -1), window_end(masses, times, 1)
    if last - first >= most:
        return None
    length = transform_length(max(last - first + 1, masses.size))
    powers = np.fft.irfft(complex_power(np.fft.rfft(masses, length), times), length)
    window = np.roll(powers, -(first % length))[: last - first + 1]
    infinite = _TAIL - math.expm1(times * math.log1p(-infinite))
    return LossDistribution(interval, low * times + first, window, infinite)


def complex_power(base: NDArray[np.complex128], exponent: int) -> NDArray[np.complex128]:
    """``base`` to a whole power above 0 by squaring: a fifth of what a complex logarithm takes, and as exact."""
    result = None
    while True:
        if exponent & 1:
            result = base if result is None else result * base
        exponent >>= 1
        if not exponent:
            assert result is not None
            return result
        base = base * base


def window_end(masses: NDArray[np.float64], times: int, side: int) -> int:
    """A place above (``side`` 1) or below (-1) which at most half of `_TAIL` of the ``times``-fold convolution lies."""
    # Each block's mass moves to its ends, with its mean kept: exponentials are convex, so no moment becomes smaller. A
    # block is narrow beside the deviation, which grows by a hundredth or less.
    places = np.arange(masses.size, dtype=np.float64)
    mean = _inner_product(masses, places)
    block = max(1, min(_BLOCK, int(0.25 * math.sqrt(_inner_product(masses, (places - mean) ** 2)))))
    blocks = np.pad(masses, (0, -masses.size % block)).reshape(-1, block)
    to_the_right = np.einsum("ij,j->i", blocks, np.arange(block) / block)
    ends = np.append(blocks.sum(1) - to_the_right, 0.0)
    ends[1:] += to_the_right
    places = np.arange(ends.size, dtype=np.float64) * block
    logs = np.log(np.maximum(ends, 1e-300))
    bound = float((masses.size - 1) * times) if side > 0 else 0.0
    order, previous, worse = 0.25 / masses.size, math.inf, 0
    for _ in range(_ORDERS):
        terms = logs + side * order * places
        largest = float(terms.max())
        log_moment = largest + math.log(float(np.exp(terms - largest).sum()))
        found = side * (times * log_moment + math.log(2 / _TAIL)) / order
        bound = min(bound, found) if side > 0 else max(bound, found)
        # The bound has one minimum over the order: past it, or level with its limit, a larger order gains nothing.
        worse = worse + 1 if side * found >= previous - 1e-3 * abs(previous) else 0
        if worse == 2:
            break
        previous = side * found
        order *= 1.7
    return math.ceil(bound) if side > 0 else math.floor(bound)


@lru_cache(maxsize=8)
def distributions(flat: Flat, adjacency: Adjacency, interval: float) -> tuple[LossDistribution, ...]:
    """The composed loss distribution in each direction (remove and add, or replace); ``flat`` must not be empty.

    Empty where its losses are too far apart for the grid.
    """
    if flat.choices:
        raise ValueError("a choice among trials has no privacy loss distribution that is known here")
    directions: tuple[Direction, ...] = ("replace",) if adjacency == "replace_one" else ("remove",)
    if adjacency != "replace_one" and flat.sampled:
        directions = ("remove", "add")
    kinds = list(flat.merged(MOST_KINDS).sampled)
    if flat.mu_squared > 0:
        kinds.append((1.0, flat.mu_squared**-0.5, 1))
    composed, most = [], _SEARCH_FACTOR * _most_points(flat)
    for direction in directions:
        total: LossDistribution | None = None
        for q, z, count in kinds:
            term = _self_compose(_one_release(z, q, interval, direction), count, most)
            if term is None:
                return ()
            total = term if total is None else total.compose(term)
            if total.masses.size > most:
                return ()
        assert total is not None
        composed.append(total)
    return tuple(composed)


def _most_points(flat: Flat) -> int:
    """The most points of a composed distribution whose Fourier transforms, one for each kind, take seconds."""
    return min(_MAX_POINTS, (1 << 27) // min(MOST_KINDS, max(1, len(flat.sampled))))


def power_rounding(flat: Flat) -> float:
    """How far rounding errors may move a composed delta.

    The power of a Fourier transform multiplies its rounding errors by the number of compositions: against the closed
    form of unsampled Gaussians, figures fall *below* the truth by up to 1e-16 a composition, which matters for delta
    under 1e-10. Every figure here is computed for a delta smaller by four times the spacing of doubles a composition.
    """
    return 4 * float(np.finfo(np.float64).eps) * sum(count for _, _, count in flat.sampled)


def epsilon_at(flat: Flat, delta: float, adjacency: Adjacency, interval: float) -> float:
    """Pessimistic epsilon at one discretisation; raises ValueError where rounding errors would decide it."""
    spare = power_rounding(flat)
    if 2 * spare > delta:
        way = f"allow {2 * spare:.1g}" if 2 * spare < 1 else "make fewer"
        raise ValueError(f"delta is {delta:g}: over this many releases rounding errors would decide; {way}")
    return max((losses.epsilon(delta - spare)) for losses in distributions(flat, adjacency, interval))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Exact delta of a Gaussian mechanism with sensitivity over noise ``mu`` (Balle and Wang 2018, Theorem 8)."""
    first = normal_mass_below(mu / 2 - epsilon / mu)
    second = math.exp(epsilon + float(log_normal_mass_below(-mu / 2 - epsilon / mu)))
    return float(first) - second


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian mechanism, exact up to 1e-9 of it and rounded upwards; 0 where delta allows it, inf for mu > 1e6."""
    if mu > _LARGEST_MU:
        return math.inf
    if mu == 0 or gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(mu, high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        if gaussian_delta(mu, middle) > delta:
            low = middle
        else:
            high = middle
    return high * (1 + 1e-9)


def _epsilon_without_sampling(flat: Flat, delta: float, adjacency: Adjacency) -> float:
    # Replacing a unit moves a sum by up to twice the bound; sampling never costs, so leaving it out is an upper bound.
    factor = 2 if adjacency == "replace_one" else 1
    return gaussian_epsilon(factor * math.sqrt(flat.unamplified_mu_squared), delta)


def _least_interval(flat: Flat, adjacency: Adjacency) -> float | None:
    """The grid below which a single loss has over 50,000 points, or None where losses are too wide for any grid."""
    mu = max(math.sqrt(squared_ratio(z)) for _, z, _ in flat.sampled) * (2 if adjacency == "replace_one" else 1)
    width = mu**2 / 2 + 10 * mu
    return None if width > _MAX_RANGE else width / 50_000


def search_epsilon(flat: Flat, delta: float, adjacency: Adjacency, interval: float = COARSE) -> float:
    """A pessimistic epsilon on a grid of ``interval`` or coarser: near the certified one, and much cheaper."""
    if flat.choices:
        return renyi.renyi_epsilon(flat, delta, adjacency)
    ceiling = _epsilon_without_sampling(flat, delta, adjacency)
    if not flat.sampled:
        return ceiling
    least = _least_interval(flat, adjacency)
    if least is None:
        return ceiling
    grid = max(interval, least)
    return min(ceiling, epsilon_at(flat, delta, adjacency, grid)) if distributions(flat, adjacency, grid) else ceiling


def certifying_interval(flat: Flat, epsilon: float, adjacency: Adjacency) -> float | None:
    """The finest grid for an ``epsilon`` of this size that fits in memory; None if the closed form is to be used."""
    least = _least_interval(flat, adjacency) if flat.sampled else None
    if least is None:
        return None
    coarse = max(COARSE, least)
    points = max((losses.masses.size for losses in distributions(flat, adjacency, coarse)), default=None)
    if points is None:
        return None
    wanted = FINEST if epsilon < _SMALL_EPSILON else FINE * max(1.0, epsilon / 10)
    return min(coarse, max(wanted, coarse * points / _most_points(flat)))


def certified_epsilon(flat: Flat, delta: float, adjacency: Adjacency) -> tuple[float, float | None]:
    """(epsilon, interval): an upper bound and the grid it was computed on, None where the closed form gave it.

    Gaussian releases without sampling have an exact closed form. The same form without amplification caps everything.
    A choice among trials has a Renyi bound and no distribution.
    """
    if flat.choices:
        return renyi.renyi_epsilon(flat, delta, adjacency), None
    ceiling = _epsilon_without_sampling(flat, delta, adjacency)
    found = search_epsilon(flat, delta, adjacency)
    used = certifying_interval(flat, found, adjacency)
    if used is None:
        return ceiling, None
    while True:
        found = epsilon_at(flat, delta, adjacency, used)
        # The figure is smaller than on the coarser grid, and so may ask for a finer one: worth it if much finer.
        finer = certifying_interval(flat, found, adjacency)
        assert finer is not None
        if finer > 0.7 * used:
            break
        used = finer
    return (found, used) if found < ceiling else (ceiling, None)
