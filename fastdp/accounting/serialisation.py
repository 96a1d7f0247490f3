"""Events as JSON and back: versioned, canonical, readable by hand."""

from __future__ import annotations

import json
import math
from typing import Any

from fastdp.accounting.event_types import DpEvent, dp_event
from fastdp.accounting.events import ChosenDpEvent, as_count, chosen
from fastdp.untrusted import parse_json, quote

EVENT_FORMAT, EVENT_VERSION = "fastdp.event", 1
#: Deeper nesting than any run produces; a longer chain is a malformed or hostile file.
_DEPTH = 32
#: Each kind of event: its class, and the fields of both forms.
_KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "gaussian": (dp_event.GaussianDpEvent, ("noise_multiplier",)),
    "poisson_sampled": (dp_event.PoissonSampledDpEvent, ("sampling_probability", "event")),
    "self_composed": (dp_event.SelfComposedDpEvent, ("count", "event")),
    "composed": (dp_event.ComposedDpEvent, ("events",)),
    "chosen": (ChosenDpEvent, ("alternatives", "shape", "stop")),
    "no_op": (dp_event.NoOpDpEvent, ()),
    "non_private": (dp_event.NonPrivateDpEvent, ()),
}


def canonical(value: Any) -> str:
    """The one JSON text of ``value``: sorted keys, no spaces, no NaN. Raises TypeError or ValueError otherwise."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def serialise(event: DpEvent) -> dict[str, Any]:
    """An event as JSON-ready values; floats survive exactly.

    Args:
        event: of the kinds that this package accounts for. Raises ValueError for another.

    >>> from fastdp.accounting import deserialise, gaussian, serialise
    >>> serialise(gaussian(1.5))["event"]
    {'kind': 'gaussian', 'noise_multiplier': 1.5}
    """
    return {"format": EVENT_FORMAT, "version": EVENT_VERSION, "event": _to_json(event)}


def _to_json(event: DpEvent) -> dict[str, Any]:
    for kind, (form, fields) in _KINDS.items():
        if isinstance(event, form):
            return {"kind": kind, **{name: _write(getattr(event, name), name) for name in fields}}
    raise ValueError(f"{type(event).__name__} has no serialised form here")


def _write(value: Any, name: str) -> Any:
    if isinstance(value, DpEvent):
        return _to_json(value)
    if isinstance(value, (list, tuple)):
        return [_to_json(part) for part in value]
    return as_count(value, name) if name == "count" else _number(value, name)


def deserialise(document: dict[str, Any] | str | bytes) -> DpEvent:
    """The event of what `serialise` returned.

    Args:
        document: JSON values, or their text. Raises ValueError, in one sentence, for what `serialise` does not write.

    >>> from fastdp.accounting import deserialise, gaussian, serialise
    >>> deserialise(serialise(gaussian(1.5))) == gaussian(1.5)
    True
    """
    if isinstance(document, (str, bytes)):
        try:
            document = parse_json(document)
        except ValueError as error:
            raise ValueError(f"the serialised event is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != EVENT_FORMAT:
        raise ValueError(f"this is not a serialised event: its format is not {EVENT_FORMAT!r}")
    if document.get("version") != EVENT_VERSION:
        raise ValueError(
            f"the serialised event has version {document.get('version')!r}; this package reads {EVENT_VERSION}"
        )
    if document.keys() != {"format", "version", "event"}:
        raise ValueError("the serialised event has fields besides format, version and event")
    return _from_json(document["event"], _DEPTH)


def _from_json(node: Any, depth: int) -> DpEvent:
    if depth == 0:
        raise ValueError(f"the serialised event is nested more than {_DEPTH} deep")
    if not isinstance(node, dict) or not isinstance(node.get("kind"), str) or node["kind"] not in _KINDS:
        kind = node.get("kind") if isinstance(node, dict) else node
        raise ValueError(f"{quote(kind)} is not a kind of event this package knows: {', '.join(_KINDS)}")
    kind = node["kind"]
    form, fields = _KINDS[kind]
    if node.keys() - {"kind"} != {*fields}:
        raise ValueError(f"a {kind} event has exactly these fields: {', '.join(sorted(fields)) or 'none'}")
    read = {name: _read(node[name], name, depth - 1) for name in fields}
    return chosen(**read) if kind == "chosen" else form(**read)


def _read(value: Any, name: str, depth: int) -> Any:
    if name == "event":
        return _from_json(value, depth)
    if name in ("events", "alternatives"):
        if not isinstance(value, list):
            raise ValueError(f"the {name} of an event must be a list")
        return [_from_json(part, depth) for part in value]
    if name == "count":
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"count is {value!r}: it must be a whole number")
        return as_count(value, name)
    return _number(value, name)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {value!r}: it must be a number")
    number = float(value)
    if name == "sampling_probability" and number > 1:
        raise ValueError(f"sampling_probability is {number}: it must lie in [0, 1]")
    # The shape of a number of trials may be negative; `chosen` checks it.
    if not math.isfinite(number) or (number < 0 and name != "shape"):
        raise ValueError(f"{name} is {number}: it must be finite and 0 or more")
    return number
