"""`epsilon` of an event: a certified upper bound, or the looser one of Opacus beside it."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

from fastdp.accounting import pld
from fastdp.accounting.event_types import DpEvent
from fastdp.accounting.events import Flat, flatten
from fastdp.accounting.pld import Adjacency
from fastdp.validate import fraction, one_of

Accountant = Literal["pld", "rdp"]

#: Below this the rounding errors of double precision weigh as much as delta itself.
SMALLEST_DELTA = 1e-12


class Epsilon(float):
    """An upper bound on epsilon: a float that remembers where it comes from.

    Attributes:
        delta: the delta it belongs to.
        accountant: ``pld`` or ``rdp``.
        adjacency: ``add_remove``, ``replace_one``, or ``zero_out`` (a unit's place is left empty), which costs what
            ``add_remove`` costs.
        interval: discretisation of a PLD figure; None for a closed form and for RDP.
        certified: True for PLD alone.
    """

    delta: float
    accountant: Accountant
    adjacency: Adjacency
    interval: float | None

    def __new__(
        cls, value: float, delta: float, accountant: Accountant, adjacency: Adjacency, interval: float | None = None
    ) -> Epsilon:
        """A float with its origin attached."""
        self = super().__new__(cls, value)
        self.delta, self.accountant, self.adjacency, self.interval = delta, accountant, adjacency, interval
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """For copy and pickle."""
        return type(self), (float(self), self.delta, self.accountant, self.adjacency, self.interval)

    @property
    def certified(self) -> bool:
        """Whether this figure may be stated as a guarantee."""
        return self.accountant == "pld"


def check_delta(delta: float) -> float:
    """``delta`` as a float; raises ValueError unless it lies in (0, 1) and above the reach of rounding errors."""
    delta = float(delta)
    fraction(delta=delta)
    if delta < SMALLEST_DELTA:
        raise ValueError(f"delta is {delta}: below {SMALLEST_DELTA} rounding errors would decide the figure")
    return delta


def check_adjacency(adjacency: str) -> None:
    """Raise ValueError for an unknown adjacency."""
    one_of(("add_remove", "replace_one", "zero_out"), adjacency=adjacency)


def epsilon(
    event: DpEvent,
    delta: float,
    accountant: Accountant | Literal["prv"] = "pld",
    adjacency: Adjacency = "add_remove",
) -> Epsilon:
    """Upper bound on epsilon of an event.

    Args:
        event: what was released; see `dpsgd`, `gaussian`, `compose`.
        delta: share of the guarantee that may fail altogether, in (0, 1).
        accountant: ``pld`` or ``rdp``.
        adjacency: what neighbouring data sets are.

    ``pld`` certifies: privacy loss distributions rounded pessimistically in both directions, on a grid of 1e-4 (1e-5
    for epsilon below 0.05; coarser above 10, and where a grid would not fit in memory). ``rdp`` is Opacus's RDP
    accountant, which knows no replacement of a unit under sampling.

    Returns 0 where nothing was released, inf where something was released without noise, and inf where RDP overflows, as
    at very small multipliers.

    Raises:
        ValueError: for an unknown accountant, adjacency or kind of event, and for delta outside (0, 1).

    >>> from fastdp.accounting import dpsgd, epsilon
    >>> spent = epsilon(dpsgd(noise_multiplier=1.0, sample_rate=0.01, steps=1000), delta=1e-5)
    >>> round(spent, 2), spent.accountant
    (1.83, 'pld')
    """
    delta = check_delta(delta)
    check_adjacency(adjacency)
    if accountant == "prv":
        warnings.warn("accountant='prv' was removed, and 'pld' takes its place", FutureWarning, stacklevel=2)
        accountant = "pld"
    one_of(("pld", "rdp"), accountant=accountant)
    flat = flatten(event)
    interval: float | None = None
    if not flat.private:
        value = math.inf
    elif flat.empty:
        value = 0.0
    elif accountant == "pld":
        value, interval = pld.certified_epsilon(flat, delta, adjacency)
    else:
        value = _rdp(flat, delta, adjacency)
    return Epsilon(value, delta, accountant, adjacency, interval)


def _rdp(flat: Flat, delta: float, adjacency: Adjacency) -> float:
    """By Opacus, whose orders papers use."""
    if flat.choices:
        raise ValueError("the rdp accountant knows no choice among trials: use accountant='pld'")
    if adjacency == "replace_one" and flat.sampled:
        raise ValueError("the rdp accountant cannot replace a unit under sampling: use accountant='pld'")
    from opacus.accountants import RDPAccountant

    mu_squared = flat.mu_squared * (4 if adjacency == "replace_one" else 1)
    accountant = RDPAccountant()
    accountant.history = [(z, q, count) for q, z, count in flat.sampled]
    if mu_squared > 0:
        accountant.history.append((mu_squared**-0.5, 1.0, 1))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = float(accountant.get_epsilon(delta))
    except (OverflowError, ValueError, FloatingPointError):
        return math.inf
    return max(value, 0.0) if value == value else math.inf
