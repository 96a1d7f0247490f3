"""Upper bounds by privacy loss distributions: `dp_accounting`, connect-the-dots, pessimistic."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from numpy.typing import NDArray
from scipy import fft, special

from fastdp.accounting.events import Flat, squared_ratio

Adjacency = Literal["add_remove", "replace_one"]

#: Discretisation of a certified figure (up to epsilon 10, then in proportion), of a small one, and of a search.
FINE, FINEST, COARSE = 1e-4, 1e-5, 1e-3
_SMALL_EPSILON = 0.05
#: Most grid points of a composed distribution: some 0.6 GB at the peak of the Fourier transform.
_MAX_POINTS = 4_000_000
#: Widest single privacy loss worth a grid; beyond, sampling buys nothing that matters.
_MAX_RANGE = 2e4
#: Mass outside the window of a composition; it counts as infinite loss.
_TAIL = 1e-15
_ORDERS = 40
#: Beyond this sensitivity over noise std an epsilon (5e11) is infinite for every purpose.
_LARGEST_MU = 1e6


class _SampledGaussian(GaussianPrivacyLoss):
    """`GaussianPrivacyLoss` whose divergences are computed for all losses at once.

    The parent inverts the privacy loss one number at a time in Python, which is two thirds of the time of a bound.
    """

    def get_delta_for_epsilon(self, epsilon: NDArray[np.float64]) -> NDArray[np.float64]:
        """Hockey-stick divergence [n] at each epsilon [n]."""
        q, variance = self.sampling_prob, self._standard_deviation**2
        sensitivity = self.sensitivity
        deltas = np.zeros_like(epsilon)
        if self.adjacency_type == AdjacencyType.REPLACE:
            x = self._replace_inverse(epsilon)
            inside = np.ones(epsilon.shape, bool)
        elif self.adjacency_type == AdjacencyType.REMOVE:
            inside = epsilon > math.log1p(-q) if q < 1 else np.ones(epsilon.shape, bool)
            deltas[~inside] = -np.expm1(epsilon[~inside])
            x = -sensitivity / 2 - _without_sampling(epsilon[inside], q) * variance / sensitivity
        else:
            inside = epsilon < -math.log1p(-q) if q < 1 else np.ones(epsilon.shape, bool)
            x = sensitivity / 2 + _without_sampling(-epsilon[inside], q) * variance / sensitivity
        upper = self.mu_upper_cdf(x)
        deltas[inside] = upper - np.exp(epsilon[inside] + self.mu_lower_log_cdf(x))
        return np.clip(deltas, 0, 1)

    def _replace_inverse(self, epsilon: NDArray[np.float64]) -> NDArray[np.float64]:
        scale = self._standard_deviation**2 / self.sensitivity
        if self.sampling_prob == 1:
            return -epsilon * scale / 2
        log_ratio = 0.5 / scale * self.sensitivity + math.log1p(-self.sampling_prob) - math.log(self.sampling_prob)
        half = np.abs(epsilon) / 2
        with np.errstate(divide="ignore", over="ignore"):
            log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2) + log_ratio
            # arcsinh(e^t) is log 2 + t to the last bit for t > 20, where e^t may overflow.
            arcsinh = np.where(log_sinh > 20, log_sinh + math.log(2), np.arcsinh(np.exp(np.minimum(log_sinh, 20))))
        return -np.sign(epsilon) * scale * (arcsinh + half)

    def noise_cdf(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Cumulative density of the noise."""
        return special.ndtr(np.divide(x, self._standard_deviation))

    def noise_log_cdf(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Logarithm of the cumulative density of the noise."""
        return special.log_ndtr(np.divide(x, self._standard_deviation))


def _without_sampling(loss: NDArray[np.float64], q: float) -> NDArray[np.float64]:
    """The loss l of the unsampled mechanism with log(1 - q + q e^l) = ``loss``, for losses above log(1 - q)."""
    if q == 1:
        return loss
    with np.errstate(over="ignore", divide="ignore"):
        small = np.log1p(np.expm1(np.minimum(loss, 30)) / q)
        large = loss - math.log(q) + np.log1p((q - 1) * np.exp(-np.maximum(loss, 30)))
    return np.where(loss > 30, large, small)


class _Single(NamedTuple):
    """Loss of one release: ``masses`` at ``low``, ``low + 1``, ... times ``interval``, and ``infinite`` at infinity."""

    interval: float
    low: int
    masses: NDArray[np.float64]
    infinite: float


def _single(sigma: float, q: float, interval: float, direction: AdjacencyType) -> _Single:
    """One release, rounded up to the grid by connecting the dots (Doroshenko et al. 2022, Algorithm 1).

    The masses at which the hockey-stick curve of the grid meets the true one in every grid point, and lies above it in
    between: with s_i = (delta_i - delta_(i+1)) / (e^h - 1) they are e^h s_(i-1) - s_i.
    """
    mechanism = _SampledGaussian(sigma, sampling_prob=q, adjacency_type=direction)
    bounds = mechanism.connect_dots_bounds()
    assert bounds.epsilon_lower is not None
    assert bounds.epsilon_upper is not None
    low, high = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
    deltas = mechanism.get_delta_for_epsilon(np.arange(low, high + 1) * interval)
    # The curve falls; where rounding makes it rise, the larger value is the safe one.
    deltas = np.maximum.accumulate(deltas[::-1])[::-1]
    slopes = -np.diff(deltas) / math.expm1(interval)
    masses = np.empty_like(deltas)
    masses[0] = 1 - deltas[0] - slopes[0]
    masses[1:] = math.exp(interval) * slopes
    masses[1:-1] -= slopes[1:]
    return _Single(interval, low, np.maximum(masses, 0), float(deltas[-1]))


def _self_compose(one: _Single, times: int) -> DensePLDPmf:
    """``times`` releases: the library's own composition at a fraction of its time.

    It needs half the Fourier transform, and seeks its window of losses (outside of which `_TAIL` of the mass may lie)
    by fewer Chernoff bounds.
    """
    interval, low, masses, infinite = one
    if times == 1:
        return DensePLDPmf(interval, low, masses, infinite, True)
    first, last = _chernoff(masses, times, -1), _chernoff(masses, times, 1)
    length = fft.next_fast_len(max(last - first + 1, masses.size), real=True)
    powers = fft.irfft(fft.rfft(masses, length) ** times, length)
    window = np.roll(powers, -(first % length))[: last - first + 1]
    infinite = _TAIL - math.expm1(times * math.log1p(-infinite))
    return DensePLDPmf(interval, low * times + first, window, infinite, True)


def _chernoff(masses: NDArray[np.float64], times: int, side: int) -> int:
    """A place above (``side`` 1) or below (-1) which at most half of `_TAIL` of the ``times``-fold convolution lies."""
    places = np.arange(masses.size, dtype=np.float64)
    logs = np.log(np.maximum(masses, 1e-300))
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
def distributions(flat: Flat, adjacency: Adjacency, interval: float) -> tuple[DensePLDPmf, ...]:
    """The composed loss distribution in each direction (remove and add, or replace); ``flat`` must not be empty."""
    if adjacency == "replace_one":
        directions = [AdjacencyType.REPLACE]
    else:
        directions = [AdjacencyType.REMOVE, AdjacencyType.ADD] if flat.sampled else [AdjacencyType.REMOVE]
    composed = []
    for direction in directions:
        total: DensePLDPmf | None = None
        for q, z, count in flat.sampled:
            term = _self_compose(_single(z, q, interval, direction), count)
            total = term if total is None else total.compose(term)
        if flat.mu_squared > 0:
            term = _self_compose(_single(flat.mu_squared**-0.5, 1.0, interval, direction), 1)
            total = term if total is None else total.compose(term)
        assert total is not None
        composed.append(total)
    return tuple(composed)


def rounding(flat: Flat) -> float:
    """How far rounding errors may move a composed delta.

    The power of a Fourier transform multiplies its rounding errors by the number of compositions: against the closed
    form of unsampled Gaussians, figures fall *below* the truth by up to 1e-16 a composition, which matters for delta
    under 1e-10. Every figure here is computed for a delta smaller by four times the spacing of doubles a composition.
    """
    return 4 * float(np.finfo(np.float64).eps) * sum(count for _, _, count in flat.sampled)


def epsilon_at(flat: Flat, delta: float, adjacency: Adjacency, interval: float) -> float:
    """Pessimistic epsilon at one discretisation; raises ValueError where rounding errors would decide it."""
    spare = rounding(flat)
    if 2 * spare > delta:
        raise ValueError(
            f"delta is {delta:g}: over this many releases rounding errors would decide; allow {2 * spare:.1g}"
        )
    return max(float(pmf.get_epsilon_for_delta(delta - spare)) for pmf in distributions(flat, adjacency, interval))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Exact delta of a Gaussian mechanism with sensitivity over noise ``mu`` (Balle and Wang 2018, Theorem 8)."""
    first = special.ndtr(mu / 2 - epsilon / mu)
    second = math.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu))
    return float(first - second)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian mechanism, exact up to a relative 1e-9 and rounded upwards; 0 where delta allows it.

    inf for mu above 1e6.
    """
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


def _bounds_by_gaussian(flat: Flat, delta: float, adjacency: Adjacency) -> float:
    # Replacing a unit moves a sum by up to twice the bound; sampling never costs, so leaving it out is an upper bound.
    factor = 2 if adjacency == "replace_one" else 1
    return gaussian_epsilon(factor * math.sqrt(flat.unamplified_mu_squared), delta)


def _coarsest(flat: Flat, adjacency: Adjacency) -> float | None:
    """The grid below which a single loss has over 50,000 points, or None where losses are too wide for any grid."""
    mu = max(math.sqrt(squared_ratio(z)) for _, z, _ in flat.sampled) * (2 if adjacency == "replace_one" else 1)
    width = mu**2 / 2 + 10 * mu
    return None if width > _MAX_RANGE else width / 50_000


def search_epsilon(flat: Flat, delta: float, adjacency: Adjacency, interval: float = COARSE) -> float:
    """A pessimistic epsilon on a grid of ``interval`` or coarser: near the certified one, and much cheaper."""
    ceiling = _bounds_by_gaussian(flat, delta, adjacency)
    if not flat.sampled:
        return ceiling
    coarsest = _coarsest(flat, adjacency)
    if coarsest is None:
        return ceiling
    return min(ceiling, epsilon_at(flat, delta, adjacency, max(interval, coarsest)))


def certifying_interval(flat: Flat, epsilon: float, adjacency: Adjacency) -> float | None:
    """The finest grid for an ``epsilon`` of this size that fits in memory; None if the closed form is to be used."""
    coarsest = _coarsest(flat, adjacency) if flat.sampled else None
    if coarsest is None:
        return None
    coarse = max(COARSE, coarsest)
    points = max(pmf.size for pmf in distributions(flat, adjacency, coarse))
    wanted = FINEST if epsilon < _SMALL_EPSILON else FINE * max(1.0, epsilon / 10)
    return min(coarse, max(wanted, coarse * points / _MAX_POINTS))


def certified_epsilon(flat: Flat, delta: float, adjacency: Adjacency) -> tuple[float, float | None]:
    """(epsilon, interval): an upper bound and the grid it was computed on, None where the closed form gave it.

    Gaussian releases without sampling have an exact closed form. The same form without amplification caps everything.
    """
    ceiling = _bounds_by_gaussian(flat, delta, adjacency)
    found = search_epsilon(flat, delta, adjacency)
    used = certifying_interval(flat, found, adjacency)
    if used is None:
        return ceiling, None
    while True:
        found = epsilon_at(flat, delta, adjacency, used)
        finer = certifying_interval(flat, found, adjacency)
        assert finer is not None
        if finer > 0.7 * used:
            break
        used = finer
    return (found, used) if found < ceiling else (ceiling, None)
