"""`verify`: whether the epsilon a card claims follows from the event on the card."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdp.accounting.accountants import epsilon
from fastdp.accounting.card import FORMAT, INFINITE, UNSAFE_KEY, VERSION, digest
from fastdp.accounting.events import Flat, flatten
from fastdp.accounting.serialisation import deserialise

#: Relative room for the rounding of another machine's Fourier transform.
_ROOM = 1e-6

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "guarantee": str,
    "why_no_guarantee": list,
    "mechanism": dict,
    "unit": str,
    "adjacency": str,
    "sampling": str,
    "dataset_size": int,
    "noise_multiplier": (int, float),
    "epsilon": dict,
    "event": dict,
    "steps": dict,
    "noise_source": dict,
    "model": dict,
    "digest": str,
}


@dataclass(frozen=True)
class VerificationResult:
    """What `verify` found; true if the claim holds.

    Attributes:
        holds: the card is intact and claims no less epsilon than its event costs.
        guarantee: it holds, and the card does claim a guarantee.
        claimed: epsilon on the card; None if it states none or could not be read.
        recomputed: certified epsilon of the event on the card; None if it was not reached.
        reason: one sentence.
    """

    holds: bool
    guarantee: bool
    claimed: float | None
    recomputed: float | None
    reason: str

    def __bool__(self) -> bool:
        return self.holds


class _Refused(ValueError):
    """A card that is not worth recomputing."""


def verify(card: Mapping[str, Any] | str | os.PathLike[str]) -> VerificationResult:
    """Recompute epsilon from a card alone.

    Args:
        card: a `Card`, its dict, its JSON text, or the path of its JSON file.

    A card that is malformed, altered, of another schema version or inconsistent does not hold, and the reason says so.
    Raises FileNotFoundError for a path that is not there.
    """
    claimed: float | None = None
    try:
        fields = _fields(_parsed(card))
        claimed = _claimed(fields["epsilon"])
        event = deserialise(fields["event"])
        flat = flatten(event)
        _check_consistent(fields, flat)
        delta = fields["epsilon"].get("delta")
        recomputed = None if delta is None else float(epsilon(event, delta, adjacency=fields["adjacency"]))
    except (ValueError, TypeError, OverflowError) as error:
        return VerificationResult(False, False, claimed, None, str(error))
    if fields["guarantee"] == "none":
        reasons = "; ".join(map(str, fields["why_no_guarantee"])) or "it gives no reason"
        return VerificationResult(True, False, claimed, recomputed, f"the card claims no guarantee: {reasons}")
    if claimed is None or recomputed is None:
        reason = "the card claims a guarantee but states no epsilon"
        return VerificationResult(False, False, claimed, recomputed, reason)
    if math.isinf(recomputed) or claimed < recomputed * (1 - _ROOM):
        reason = f"the card claims epsilon {claimed:.6g} but its event costs {recomputed:.6g} at delta {delta:g}"
        return VerificationResult(False, False, claimed, recomputed, reason)
    reason = f"the claimed epsilon {claimed:.6g} covers the recomputed {recomputed:.6g} at delta {delta:g}"
    return VerificationResult(True, True, claimed, recomputed, reason)


def _parsed(card: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(card, Mapping):
        return card
    text: str | bytes
    if isinstance(card, str) and card.lstrip().startswith(("{", "[")):
        text = card
    else:
        text = Path(card).read_bytes()
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Refused(f"the card is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise _Refused("the card is not a JSON object")
    return parsed


def _fields(card: Mapping[str, Any]) -> Mapping[str, Any]:
    if card.get("format") != FORMAT:
        raise _Refused(f"this is not a card: its format is not {FORMAT!r}")
    if card.get("version") != VERSION:
        raise _Refused(f"the card has schema version {card.get('version')!r}; this package reads version {VERSION}")
    for name, kind in _FIELDS.items():
        if not isinstance(card.get(name), kind) or isinstance(card.get(name), bool):
            raise _Refused(f"the card is malformed: {name} is missing or of the wrong type")
    try:
        intact = card["digest"] == digest(card)
    except (TypeError, ValueError):
        intact = False
    if not intact:
        raise _Refused("the card was altered after it was written: its digest does not match")
    return card


def _claimed(fields: Mapping[str, Any]) -> float | None:
    value = fields.get("upper_bound")
    if value is None:
        return None
    if value == INFINITE:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise _Refused("the card is malformed: its epsilon is not a number")
    return float(value)


def _check_consistent(card: Mapping[str, Any], flat: Flat) -> None:
    if card["guarantee"] != "none":
        if card["noise_source"].get("key") == UNSAFE_KEY:
            raise _Refused("the card claims a guarantee for noise from a reproducible key")
        if card["why_no_guarantee"]:
            raise _Refused("the card claims a guarantee and gives reasons why there is none")
    spent, rate, multiplier = card["steps"].get("spent"), card.get("sample_rate"), card["noise_multiplier"]
    if isinstance(spent, bool) or not isinstance(spent, int) or spent < 0:
        raise _Refused("the card is malformed: its spent steps are not a count")
    if spent == 0 or multiplier == 0 or not flat.private or not isinstance(rate, (int, float)) or not 0 < rate <= 1:
        return
    if card["sampling"] == "poisson" and rate < 1:
        counted = sum(count for q, z, count in flat.sampled if q >= rate and z <= multiplier)
        if counted < spent:
            raise _Refused(f"the card states {spent} steps, but its event holds {counted} at that rate and multiplier")
    elif card["sampling"] in ("poisson", "shuffled"):
        steps_per_use = 1 if card["sampling"] == "poisson" else math.ceil(1 / rate - 1e-9)
        if flat.mu_squared < -(-spent // steps_per_use) / multiplier**2 * (1 - _ROOM):
            raise _Refused(f"the card states {spent} steps, but its event holds fewer at that multiplier")
