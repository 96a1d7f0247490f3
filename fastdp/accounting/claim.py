"""What a run claims: a guarantee of one of three kinds, with what it takes to work the figure out again.

A central run claims an epsilon of its event (`Gaussian`). A perturbation at the source claims a bound for each of its units, such
as a token: epsilon (`Pure`), or epsilon for each unit of distance (`Metric`); bounds of several units and releases add up.
`ExternalClaim` names a promise that another card certifies. Each writes itself as fields of a card, reads itself back, and says
whether the figures that a card states follow from what it holds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any, ClassVar

from fastdp.accounting.accountants import Epsilon, check_adjacency, epsilon
from fastdp.accounting.event_types import DpEvent
from fastdp.accounting.events import as_count, flatten
from fastdp.accounting.meaning import FALSE_POSITIVE_RATES, membership_bound
from fastdp.accounting.pld import Adjacency
from fastdp.accounting.serialisation import deserialise, serialise
from fastdp.untrusted import quote
from fastdp.validate import integer, positive

#: What stands in JSON for an infinite epsilon.
INFINITE = "inf"
#: Relative room for the rounding of another machine's Fourier transform, and for another version's looser figure.
ROOM, LOOSER = 1e-6, 0.01


class UnsupportedFigure(ValueError):
    """A figure on a card that its own fields do not bear out; carries what was claimed and recomputed, as far as known."""

    def __init__(self, reason: str, claimed: float | None = None, recomputed: float | None = None):
        super().__init__(reason)
        self.claimed, self.recomputed = claimed, recomputed


@dataclass(frozen=True)
class CheckedFigures:
    """A figure that follows: what was claimed, what was recomputed (None where there is no figure), and a sentence."""

    claimed: float | None
    recomputed: float | None
    reason: str


class Claim(ABC):
    """What the kinds have in common.

    Attributes:
        kind: its name on a card.
        unit: what is protected, in words.
    """

    kind: ClassVar[str]
    unit: str

    @property
    @abstractmethod
    def guarantee(self) -> str:
        """What it is called, on a card whose claim is not void."""

    def flaws(self) -> list[str]:
        """Why it guarantees nothing, as far as that follows from itself."""
        return []

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Its fields on a card; read back by the kind's ``from_json``, which raises ValueError for what cannot be read."""

    @abstractmethod
    def headline(self, fields: Mapping[str, Any]) -> tuple[str, str]:
        """The bound and what it holds for, in words, of the figures in its fields."""

    @abstractmethod
    def check(self, fields: Mapping[str, Any]) -> CheckedFigures:
        """Work the figures in its fields out again. Raises `UnsupportedFigure` where they claim too little."""


@dataclass(frozen=True)
class Gaussian(Claim):
    """Differential privacy of a composition of Gaussian releases.

    Args:
        unit: what is protected: an example, a user, a client.
        adjacency: what neighbouring data sets are.
        event: what was released.
        delta: None states no epsilon, and so no guarantee.
        target: epsilon that was planned.
    """

    unit: str
    adjacency: Adjacency
    event: DpEvent
    delta: float | None
    target: float | None = None
    kind: ClassVar[str] = "gaussian"
    guarantee = "differential privacy"

    def __post_init__(self) -> None:
        check_adjacency(self.adjacency)

    def flaws(self) -> list[str]:
        if not flatten(self.event).private:
            return ["something was released without noise (noise multiplier 0)"]
        return ["no delta was given, so no epsilon is stated"] if self.delta is None else []

    def to_json(self) -> dict[str, Any]:
        bound = None if self.delta is None else epsilon(self.event, self.delta, adjacency=self.adjacency)
        return {
            "kind": self.kind,
            "unit": self.unit,
            "adjacency": self.adjacency,
            "epsilon": {
                "upper_bound": None if bound is None else _finite(bound),
                "delta": self.delta,
                "accountant": self._accountant,
                "grid": None if bound is None else bound.interval,
                "target": None if self.target is None else _finite(self.target),
            },
            "membership": {} if self.flaws() else self._membership(),
            "event": serialise(self.event),
        }

    @property
    def _accountant(self) -> str:
        return "rdp" if flatten(self.event).choices else "pld"

    def _membership(self) -> dict[str, float]:
        return {f"{rate:g}": membership_bound(self.event, rate, self.adjacency) for rate in FALSE_POSITIVE_RATES}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Gaussian:
        stated = fields["epsilon"]
        target = stated.get("target")
        event = deserialise(fields["event"])
        adjacency: Any = fields["adjacency"]
        return cls(
            str(fields["unit"]), adjacency, event, stated.get("delta"), math.inf if target == INFINITE else target
        )

    def headline(self, fields: Mapping[str, Any]) -> tuple[str, str]:
        stated = fields["epsilon"]
        return (
            f"epsilon <= {two_decimals(stated['upper_bound'])} at delta = {stated['delta']:g}",
            f", for each {without_article(fields['unit'])} ({fields['adjacency'].replace('_', '/')} adjacency).",
        )

    def check(self, fields: Mapping[str, Any]) -> CheckedFigures:
        claimed = _claimed(fields["epsilon"])
        try:
            bound = None if self.delta is None else epsilon(self.event, self.delta, adjacency=self.adjacency)
        except (ValueError, TypeError, OverflowError) as error:
            raise UnsupportedFigure(str(error), claimed) from None
        found = None if bound is None else float(bound)
        if self.flaws() or claimed is None or bound is None or found is None:
            reason = "the card claims a guarantee but states no epsilon"
            raise UnsupportedFigure("; ".join(self.flaws()) if found is not None else reason, claimed, found)
        if misstated := self._misstated(fields, claimed, bound):
            raise UnsupportedFigure(misstated, claimed, found)
        reason = f"the claimed epsilon {claimed:.6g} covers the recomputed {found:.6g} at delta {self.delta:g}"
        return CheckedFigures(claimed, found, reason)

    def _misstated(self, fields: Mapping[str, Any], claimed: float, bound: Epsilon) -> str | None:
        """Which of the card's figures its event does not bear out, in words; None if it bears out all of them."""
        # Claims of the first version have no kind, and state less.
        found, complete = float(bound), "kind" in fields
        if claimed < found * (1 - ROOM):
            return f"the card claims epsilon {claimed:.6g} but its event costs {found:.6g} at delta {self.delta:g}"
        if complete and claimed > found * (1 + LOOSER):
            return (
                f"the card claims epsilon {claimed:.6g}, more than the {found:.6g} of its event at delta {self.delta:g}"
            )
        if complete and (reason := self._misstated_account(fields["epsilon"], bound, claimed)):
            return reason
        rates, own = fields.get("membership", {}), self._membership()
        if foreign := rates.keys() - own.keys():
            return f"the card states a true-positive rate at {quote(min(foreign))}"
        for rate, most in own.items():
            stated = rates.get(rate, None if complete else 1.0)
            highest = min(1.0, most * (1 + LOOSER)) if complete else 1.0
            if not (isinstance(stated, (int, float)) and highest >= stated >= most * (1 - ROOM)):
                return (
                    f"the card states the true-positive rate {stated!r} at a false-positive rate of {rate}, but its event "
                    f"gives {most:.4g}"
                )
        return None

    def _misstated_account(self, stated: Mapping[str, Any], bound: Epsilon, claimed: float) -> str | None:
        """The same of the accountant, the grid and the target."""
        if stated.get("accountant") != self._accountant:
            return f"the accountant of its event is {self._accountant}, not {quote(stated.get('accountant'))}"
        grid, target = stated["grid"], stated["target"]
        if not (grid == bound.interval or isinstance(grid, float) and math.isclose(grid, bound.interval or 0)):
            return f"the grid of its event is {bound.interval}, not {quote(grid)}"
        if target not in (None, INFINITE) and not (type(target) in (int, float) and target >= claimed * (1 - ROOM)):
            return f"the target {quote(target)} lies below the claimed epsilon"
        return None


@dataclass(frozen=True)
class Pure(Claim):
    """Epsilon of each unit of a text, without a delta.

    Args:
        unit: what is protected: one private token, a text.
        nats: epsilon of one unit in one release.
        units: most units in one text, whose bounds add up; None where that is not known.
        releases: of each text, whose bounds add up.
    """

    unit: str
    nats: float
    units: int | None = None
    releases: int = 1
    kind: ClassVar[str] = "pure"
    words: ClassVar[str] = "epsilon-local differential privacy"

    def __post_init__(self) -> None:
        positive(**{"the bound of one unit": self.nats})
        integer(1, releases=self.releases)
        if self.units is not None:
            as_count(self.units, "units of a text")

    @property
    def guarantee(self) -> str:
        return f"{self.words} of {self.unit}"

    @property
    def of_a_text(self) -> float | None:
        """Bound of all units of one text in all its releases; None where their number is not known."""
        return None if self.units is None else self.nats * self.units * self.releases

    @property
    def bound(self) -> str:
        """The bound of one unit in all releases of its text, rounded up."""
        return f"epsilon {_six_digits(self.nats * self.releases)}"

    def to_json(self) -> dict[str, Any]:
        budget = {"of_a_unit": self.nats, "units": self.units, "releases": self.releases, "of_a_text": self.of_a_text}
        return {"kind": self.kind, "unit": self.unit, "budget": budget, "bound": self.bound}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Pure:
        budget = fields["budget"]
        return cls(str(fields["unit"]), budget["of_a_unit"], budget["units"], budget["releases"])

    def headline(self, fields: Mapping[str, Any]) -> tuple[str, str]:
        total = fields["budget"]["of_a_text"]
        added = "" if total is None else f" All units of one text together: {_six_digits(total)}."
        return fields["bound"], f" for {fields['unit']} ({self.words}).{added}"

    def check(self, fields: Mapping[str, Any]) -> CheckedFigures:
        stated = fields["budget"]["of_a_text"]
        one, total = self.nats * self.releases, self.of_a_text
        if fields["bound"] != self.bound:
            raise UnsupportedFigure(
                f"the card's bound is {fields['bound']!r}, but its figures give {self.bound!r}", None, one
            )
        reason = f"the bound, {self.bound}, follows from the card's figures"
        if total is None and stated is None:
            return CheckedFigures(one, one, reason)
        if total is None:
            raise UnsupportedFigure(f"the card states {stated!r} for a text, but not how many units one has", None, one)
        if not isinstance(stated, (int, float)) or not math.isclose(stated, total, rel_tol=ROOM):
            raise UnsupportedFigure(
                f"the card states {stated!r} for a text, but its units add up to {total:.6g}", stated, total
            )
        return CheckedFigures(stated, total, reason)


@dataclass(frozen=True)
class Metric(Pure):
    """As `Pure`, for each unit of distance (d_chi privacy): near values are hard to tell apart, far ones need not be.

    Args:
        distance: between what, in words.
    """

    distance: str = "distance"
    kind: ClassVar[str] = "metric"
    words: ClassVar[str] = "metric differential privacy (d_chi)"

    @property
    def bound(self) -> str:
        return f"exp({_six_digits(self.nats * self.releases)} * {self.distance})"

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "distance": self.distance}

    def headline(self, fields: Mapping[str, Any]) -> tuple[str, str]:
        bound, words = super().headline(fields)
        return (
            f"epsilon {_six_digits(self.nats * self.releases)} per unit of {fields['distance']}",
            f", or {bound},{words}",
        )

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Metric:
        budget = fields["budget"]
        return cls(
            str(fields["unit"]), budget["of_a_unit"], budget["units"], budget["releases"], str(fields["distance"])
        )


@dataclass(frozen=True)
class ExternalClaim(Claim):
    """A promise that another card certifies.

    Args:
        unit: what is protected.
        promise: in words.
        card: which card certifies it.
    """

    unit: str
    promise: str
    card: str
    kind: ClassVar[str] = "elsewhere"

    @property
    def guarantee(self) -> str:
        return f"certified by {self.card}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "unit": self.unit, "promise": self.promise, "certified_by": self.card}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ExternalClaim:
        return cls(str(fields["unit"]), str(fields["promise"]), str(fields["certified_by"]))

    def headline(self, fields: Mapping[str, Any]) -> tuple[str, str]:
        return fields["promise"], f" ({fields['certified_by']} certifies it)."

    def check(self, fields: Mapping[str, Any]) -> CheckedFigures:
        return CheckedFigures(None, None, f"{self.card} certifies: {self.promise}")


_KINDS: dict[str, Any] = {kind.kind: kind for kind in (Gaussian, Pure, Metric, ExternalClaim)}


def read_claim(fields: Mapping[str, Any]) -> Claim:
    """The claim in a card's fields. Raises ValueError, in one sentence, for fields that hold none."""
    kind = fields.get("kind", Gaussian.kind)
    if kind not in _KINDS:
        raise ValueError(f"{kind!r} is not a kind of claim this package knows: {', '.join(_KINDS)}")
    try:
        return _KINDS[kind].from_json(fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the card is malformed: its {kind} claim cannot be read ({error})") from None


def _claimed(stated: Mapping[str, Any]) -> float | None:
    value = stated.get("upper_bound")
    if value is None:
        return None
    if value == INFINITE:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError("the card is malformed: its epsilon is not a number")
    return float(value)


def _finite(value: float) -> float | str:
    return float(value) if math.isfinite(value) else INFINITE


def without_article(unit: str) -> str:
    """A unit's name without its article: ``user's sequence`` for ``one user's sequence``."""
    first, _, rest = unit.partition(" ")
    return rest if first in ("each", "one", "every") and rest else unit


def rounded_up(value: float | str | None) -> str:
    """A bound for a reader: never below what it was."""
    if value is None:
        return "not stated"
    if isinstance(value, str):
        return "infinite" if value == INFINITE else value
    return f"{math.ceil(value * 1e4) / 1e4:g}" if value < 100 else f"{math.ceil(value)}"


def two_decimals(value: float | str | None) -> str:
    """An epsilon for a headline: two decimals, rounded up."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return rounded_up(value)
    return str(Decimal(value).quantize(Decimal("0.01"), ROUND_CEILING))


def _six_digits(value: float) -> str:
    """Six digits, rounded up."""
    shown = f"{value:.6g}"
    return shown if float(shown) >= value * (1 - 1e-12) else f"{value * (1 + 5e-6):.6g}"
