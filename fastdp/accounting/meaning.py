"""What a bound means to a person: the most that someone who sees all of a release can learn about one unit's presence."""

from __future__ import annotations

import math
from functools import lru_cache

from fastdp.accounting.accountants import check_adjacency
from fastdp.accounting.event_types import DpEvent
from fastdp.accounting.events import flatten
from fastdp.accounting.pld import Adjacency, power_rounding, search_epsilon
from fastdp.accounting.serialisation import canonical, deserialise, serialise

#: False-positive rates at which a card bounds the true-positive rate.
FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
#: Deltas at which the curve of an event is looked at. Each gives a bound, so more of them only make it tighter.
_DELTAS = (*(1 - 0.5**k for k in range(7, 1, -1)), *(10 ** (-k / 6) for k in range(1, 42)))


def membership_bound(event: DpEvent, false_positive_rate: float, adjacency: Adjacency = "add_remove") -> float:
    """Largest true-positive rate of any test for whether one unit took part, at a given false-positive rate.

    It holds for one who sees everything released, knows every other unit, and has any computing power. With epsilon(delta)
    of both directions, the test's rates (a, b) obey two bounds (Wasserman and Zhou 2010, Theorem 2.4; Kairouz et al. 2015):
    ``b <= e^epsilon a + delta`` and ``1 - a <= e^epsilon (1 - b) + delta``. The smallest such b over a grid of deltas is an
    upper bound of the event's trade-off function (Dong et al. 2019).

    Args:
        event: what was released; without noise the bound is 1.
        false_positive_rate: share of the units that took no part which the test takes for members. Raises ValueError for one
            outside [0, 1].
        adjacency: what neighbouring data sets are.

    >>> from fastdp.accounting import gaussian, membership_bound
    >>> round(membership_bound(gaussian(2.0), 0.01), 3)  # at a false-positive rate of 1%
    0.034
    """
    if not 0 <= false_positive_rate <= 1:
        raise ValueError(f"the false-positive rate is {false_positive_rate}: it must lie between 0 and 1")
    check_adjacency(adjacency)
    rate, curve = false_positive_rate, _curve(canonical(serialise(event)), adjacency)
    found = [math.exp(min(bound, 700.0)) * rate + delta for delta, bound in curve]
    found += [1 - math.exp(-bound) * (1 - delta - rate) for delta, bound in curve]
    return max(rate, min([1.0, *found]))


@lru_cache(maxsize=32)
def _curve(event: str, adjacency: Adjacency) -> tuple[tuple[float, float], ...]:
    flat = flatten(deserialise(event))
    if flat.empty:
        return ((0.0, 0.0),)
    if not flat.private:
        return ()
    return tuple((d, search_epsilon(flat, d, adjacency)) for d in _DELTAS if d > 2 * power_rounding(flat))
