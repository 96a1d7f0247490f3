"""Renyi differential privacy of Gaussian releases, and of choosing the best of a secret number of trials.

A choice among trials has no privacy loss distribution that is known in closed form; its Renyi bound is a theorem. At whole
orders sampled Gaussians have a closed form (Mironov, Talwar and Zhang 2019, section 3.3). Between them the logarithm of the
moment is convex, so a chord bounds it from above.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fastdp.accounting.events import MOST_KINDS, Choice, Flat

_INTEGER_ORDERS = (*range(2, 65), *range(68, 129, 4), *range(144, 513, 16))
#: Orders at which bounds are turned into an epsilon.
_ORDERS = (*(1 + k / 20 for k in range(1, 60)), *(order for order in _INTEGER_ORDERS if order >= 4))


def mean_trials(shape: float, stop: float) -> float:
    """Expected number of trials of the truncated negative binomial distribution (Papernot and Steinke 2022, Definition 1).

    In the paper ``shape`` is eta, above -1, and ``stop`` gamma, in (0, 1).
    """
    check_stopping(shape, stop)
    if shape == 0:
        return (1 / stop - 1) / math.log(1 / stop)
    return shape * (1 - stop) / (stop * -math.expm1(shape * math.log(stop)))


def stop_for(trials: float, shape: float) -> float:
    """The gamma at which so many trials are expected. Raises ValueError unless that is more than 1."""
    if not 1 < trials < 1e6:
        raise ValueError(f"{trials:g} trials are expected: ask for more than 1, and for less than a million")
    low, high = -60.0, -1e-9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_trials(shape, math.exp(middle)) > trials else (low, middle)
    return math.exp(low)


def trial_probabilities(shape: float, stop: float) -> Iterator[float]:
    """The probabilities of 1 trial, 2 trials, ... under the same distribution."""
    check_stopping(shape, stop)
    if shape == 0:
        chance = (1 - stop) / math.log(1 / stop)
    else:
        chance = (1 - stop) * shape / math.expm1(-shape * math.log(stop))
    for count in itertools.count(1):
        yield chance
        chance *= (1 - stop) * (count + shape) / (count + 1)


def draw_trials(shape: float, stop: float, uniform: float) -> int:
    """The number of trials that a uniform number in [0, 1) stands for."""
    for count, chance in enumerate(trial_probabilities(shape, stop), 1):
        uniform -= chance
        # Beyond a million nothing is left that a double could hold.
        if uniform < 0 or count == 1_000_000:
            return count
    raise AssertionError


def check_stopping(shape: float, stop: float) -> None:
    """Raise ValueError for what is no truncated negative binomial distribution."""
    if not -1 < shape < math.inf:
        raise ValueError(f"the shape of the number of trials is {shape}: it must be above -1")
    if not 0 < stop < 1:
        raise ValueError(f"the chance of stopping is {stop}: it must lie between 0 and 1")


def renyi_epsilon(flat: Flat, delta: float, adjacency: str) -> float:
    """An upper bound on epsilon at ``delta`` (Canonne, Kamath and Steinke 2020, Proposition 12).

    Raises ValueError where a unit is replaced under sampling, of which these bounds know nothing.
    """
    if not flat.private:
        return math.inf
    found = (
        spent + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        for order, spent in divergences(flat, adjacency)
        if spent < math.inf
    )
    return max(min(found, default=math.inf), 0.0)


@lru_cache(maxsize=8)
def divergences(flat: Flat, adjacency: str) -> tuple[tuple[float, float], ...]:
    """(order, Renyi divergence) of an event."""
    # Each alternative of a choice takes as long as the releases themselves: all share the kinds that are told apart.
    counts = Counter(flat.choices)
    kinds = max(1, MOST_KINDS // (1 + sum(len(choice.alternatives) for choice in counts)))
    choices = [(n, replace(c, alternatives=tuple(a.merged(kinds) for a in c.alternatives))) for c, n in counts.items()]
    flat, added = flat.merged(kinds), sum(n * _added(choice, adjacency) for n, choice in choices)

    def spent(order: float) -> float:
        dearest = sum(n * _renyi_of_choice(choice, order, adjacency) for n, choice in choices)
        return _renyi_of_releases(flat, order, adjacency) + added + dearest

    return tuple((order, spent(order)) for order in _ORDERS)


def _renyi_of_releases(flat: Flat, order: float, adjacency: str) -> float:
    if adjacency == "replace_one" and flat.sampled:
        raise ValueError(
            "what choosing among trials costs is not known for a unit that is replaced under sampling: use add_remove, or "
            "shuffled batches"
        )
    spent = order * flat.mu_squared * (4 if adjacency == "replace_one" else 1) / 2
    return spent + sum(count * sampled_moment(rate, multiplier, order) for rate, multiplier, count in flat.sampled)


def _renyi_of_choice(choice: Choice, order: float, adjacency: str) -> float:
    """Papernot and Steinke 2022 (arXiv:2110.03620), Theorem 2, for a unit that meets the dearest alternative of a trial.

    Without `_added`.
    """
    return _trial(choice, order, adjacency) + math.log(mean_trials(choice.shape, choice.stop)) / (order - 1)


def _trial(choice: Choice, order: float, adjacency: str) -> float:
    """The divergence of the dearest alternative."""
    return max((_renyi_of_releases(part, order, adjacency) for part in choice.alternatives), default=0.0)


def _added(choice: Choice, adjacency: str) -> float:
    """The term of the same theorem that is one for all orders."""
    factor = 1 + choice.shape
    over = factor * math.log(1 / choice.stop)
    # At order 1 the second term falls away; it is allowed, and bounds the rest.
    return min([over, *(factor * (1 - 1 / at) * _trial(choice, at, adjacency) + over / at for at in _INTEGER_ORDERS)])


def sampled_moment(rate: float, multiplier: float, order: float) -> float:
    """The Renyi divergence of one sampled release: of a whole ``order`` in closed form, and by the chord between two."""
    below = math.floor(order)
    share = order - below
    moment = (1 - share) * _log_moment(rate, multiplier, below)
    if share:
        moment += share * _log_moment(rate, multiplier, below + 1)
    return moment / (order - 1)


@lru_cache(maxsize=65536)
def _log_moment(rate: float, multiplier: float, order: int) -> float:
    """The logarithm of A(order) of a sampled Gaussian, which bounds both directions."""
    if order == 1:
        return 0.0
    k = np.arange(order + 1, dtype=np.float64)
    terms = (
        _log_binomials(order) + (order - k) * math.log1p(-rate) + k * math.log(rate) + k * (k - 1) / (2 * multiplier**2)
    )
    most = float(terms.max())
    if not most < math.inf:
        return math.inf
    # Rounded up: some 1e-13 of relative error could lie in the terms.
    return max(0.0, most + math.log(float(np.exp(terms - most).sum()))) * (1 + 1e-9) + 1e-15


@lru_cache(maxsize=1024)
def _log_binomials(order: int) -> NDArray[np.float64]:
    factorials = np.array([math.lgamma(i + 1) for i in range(order + 1)])
    return factorials[order] - factorials - factorials[::-1]
