"""`epsilon` of an event by three accountants, each an upper bound or nothing."""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any, Literal

from fastdp.accounting import pld
from fastdp.accounting.event_types import DpEvent
from fastdp.accounting.events import Flat, flatten
from fastdp.accounting.pld import Adjacency
from fastdp.validate import fraction, one_of

Accountant = Literal["pld", "prv", "rdp"]

#: Error of the PRV accountant in epsilon; it is part of the bound, and grows where memory asks for it.
_PRV_ERROR = 0.01
#: Most grid points of a PRV domain: long doubles in some ten arrays, 0.2 GB. Opacus issue 602 ate all there was.
_PRV_POINTS = 1_000_000
_PRV_LARGEST_ERROR = 1.0
#: Below this the rounding errors of double precision weigh as much as delta itself.
SMALLEST_DELTA = 1e-12


class Epsilon(float):
    """An upper bound on epsilon: a float that remembers where it comes from.

    Attributes:
        delta: the delta it belongs to.
        accountant: ``pld``, ``prv`` or ``rdp``.
        adjacency: ``add_remove``, ``replace_one``, or ``zero_out`` (a unit's place is left empty), which costs what
            ``add_remove`` costs.
        interval: discretisation of a PLD figure; None for a closed form and for other accountants.
        certified: True for PLD alone. PRV looks at the removal of a unit only, and RDP follows Opacus's orders: both
            are cross-checks.
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
    fraction(delta=delta)
    if delta < SMALLEST_DELTA:
        raise ValueError(f"delta is {delta}: below {SMALLEST_DELTA} rounding errors would decide the figure")
    return float(delta)


def check_adjacency(adjacency: str) -> None:
    """Raise ValueError for an unknown adjacency."""
    one_of(("add_remove", "replace_one", "zero_out"), adjacency=adjacency)


def epsilon(
    event: DpEvent, delta: float, accountant: Accountant = "pld", adjacency: Adjacency = "add_remove"
) -> Epsilon:
    """Upper bound on epsilon of an event.

    Args:
        event: what was released; see `dpsgd`, `gaussian`, `compose`.
        delta: share of the guarantee that may fail altogether, in (0, 1).
        accountant: ``pld``, ``prv`` or ``rdp``.
        adjacency: what neighbouring data sets are.

    ``pld`` certifies: privacy loss distributions rounded pessimistically in both directions, on a grid of 1e-4 (1e-5
    for epsilon below 0.05; coarser above 10, and where a grid would not fit in memory). Over 256 kinds of sampled release
    count as fewer, dearer ones, and losses too far apart for a grid as if nothing were sampled. ``prv`` is prv_accountant's
    *upper* bound, never its estimate (Gopi et al. 2021, Theorem 5.5). ``rdp`` is Opacus's RDP accountant. These two
    know no replacement of a unit under sampling.

    Returns 0 where nothing was released, and inf where something was released without noise. It returns inf as well where
    an accountant reaches no bound. PRV and RDP overflow at very small multipliers. PRV's grid is capped in size, and above
    epsilon of some hundreds no grid within the cap is fine enough.

    Raises ValueError for an unknown accountant, adjacency or kind of event, and for delta outside (0, 1).

    >>> from fastdp.accounting import dpsgd, epsilon
    >>> spent = epsilon(dpsgd(noise_multiplier=1.0, sample_rate=0.01, steps=1000), delta=1e-5)
    >>> round(spent, 2), spent.accountant
    (1.83, 'pld')
    """
    delta = check_delta(delta)
    check_adjacency(adjacency)
    one_of(("pld", "prv", "rdp"), accountant=accountant)
    flat = flatten(event)
    interval: float | None = None
    if not flat.private:
        value = math.inf
    elif flat.empty:
        value = 0.0
    elif accountant == "pld":
        value, interval = pld.certified_epsilon(flat, delta, adjacency)
    else:
        value = (_prv if accountant == "prv" else _rdp)(_one_direction(flat, accountant, adjacency), delta)
    return Epsilon(value, delta, accountant, adjacency, interval)


def _one_direction(flat: Flat, accountant: str, adjacency: Adjacency) -> Flat:
    if flat.choices:
        raise ValueError(f"the {accountant} accountant knows no choice among trials: use accountant='pld'")
    if adjacency != "replace_one":
        return flat
    if flat.sampled:
        raise ValueError(f"the {accountant} accountant cannot replace a unit under sampling: use accountant='pld'")
    return Flat((), 4 * flat.mu_squared)


def _prv(flat: Flat, delta: float) -> float:
    from prv_accountant import PRVAccountant
    from prv_accountant.accountant import compute_safe_domain_size
    from prv_accountant.privacy_random_variables import GaussianMechanism, PoissonSubsampledGaussianMechanism

    variables: list[Any] = [PoissonSubsampledGaussianMechanism(q, z) for q, z, _ in flat.sampled]
    counts = [count for _, _, count in flat.sampled]
    if flat.mu_squared > 0:
        variables.append(GaussianMechanism(flat.mu_squared**-0.5))
        counts.append(1)
    for variable in variables:
        # Asked four times for each of 150 orders, which was most of what the bound took.
        variable.rdp = cache(variable.rdp)
    delta_error = delta / 1000
    error = _PRV_ERROR
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            width = compute_safe_domain_size(variables, counts, eps_error=error, delta_error=delta_error)
            if not math.isfinite(width):
                return math.inf
            mesh = math.sqrt(sum(counts) / 2 * math.log(12 / delta_error))
            error = max(error, 2 * width * mesh / _PRV_POINTS)
            if error > _PRV_LARGEST_ERROR:
                return math.inf
            accountant = PRVAccountant(
                prvs=variables, max_self_compositions=counts, eps_error=error, delta_error=delta_error
            )
            _, _, upper = accountant.compute_epsilon(delta, counts)
    except (OverflowError, RuntimeError, ValueError, FloatingPointError, IndexError):
        return math.inf
    return float(upper) if upper == upper else math.inf


def _rdp(flat: Flat, delta: float) -> float:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(z, q, count) for q, z, count in flat.sampled]
    if flat.mu_squared > 0:
        accountant.history.append((flat.mu_squared**-0.5, 1.0, 1))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = float(accountant.get_epsilon(delta))
    except (OverflowError, ValueError, FloatingPointError):
        return math.inf
    return max(value, 0.0) if value == value else math.inf
