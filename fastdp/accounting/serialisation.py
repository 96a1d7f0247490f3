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


def canonical(value: Any) -> str:
    """The one JSON text of ``value``: sorted keys, no spaces, no NaN. Raises TypeError or ValueError otherwise."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def serialise(event: DpEvent) -> dict[str, Any]:
    """An event as JSON-ready values; floats survive exactly.

    Kinds: ``gaussian`` (noise_multiplier), ``poisson_sampled`` (sampling_probability, event), ``self_composed`` (count,
    event), ``composed`` (events), ``chosen`` (alternatives, shape, stop), ``no_op``,
    ``non_private``.

    Args:
        event: of a kind named above.

    Raises:
        ValueError: for any other kind.

    >>> from fastdp.accounting import deserialise, gaussian, serialise
    >>> serialise(gaussian(1.5))["event"]
    {'kind': 'gaussian', 'noise_multiplier': 1.5}
    """
    return {"format": EVENT_FORMAT, "version": EVENT_VERSION, "event": _to_json(event)}


def _to_json(event: DpEvent) -> dict[str, Any]:
    if isinstance(event, dp_event.GaussianDpEvent):
        return {"kind": "gaussian", "noise_multiplier": _number(event.noise_multiplier, "noise_multiplier")}
    if isinstance(event, dp_event.PoissonSampledDpEvent):
        rate = _number(event.sampling_probability, "sampling_probability")
        return {"kind": "poisson_sampled", "sampling_probability": rate, "event": _to_json(event.event)}
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return {"kind": "self_composed", "count": as_count(event.count, "count"), "event": _to_json(event.event)}
    if isinstance(event, dp_event.ComposedDpEvent):
        return {"kind": "composed", "events": [_to_json(part) for part in event.events]}
    if isinstance(event, dp_event.NoOpDpEvent):
        return {"kind": "no_op"}
    if isinstance(event, dp_event.NonPrivateDpEvent):
        return {"kind": "non_private"}
    if isinstance(event, ChosenDpEvent):
        parts = [_to_json(part) for part in event.alternatives]
        return {"kind": "chosen", "alternatives": parts, "shape": event.shape, "stop": event.stop}
    raise ValueError(f"{type(event).__name__} has no serialised form here")


def deserialise(document: dict[str, Any] | str | bytes) -> DpEvent:
    """The event of what `serialise` returned, or of its JSON text.

    Args:
        document: JSON values, or their text.

    Raises:
        ValueError: in one sentence, for text that is not JSON, an unknown version or kind, and missing, unknown or
            ill-typed fields.

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


_FIELDS = {
    "gaussian": {"noise_multiplier"},
    "poisson_sampled": {"sampling_probability", "event"},
    "self_composed": {"count", "event"},
    "composed": {"events"},
    "chosen": {"alternatives", "shape", "stop"},
    "no_op": set(),
    "non_private": set(),
}


def _from_json(node: Any, depth: int) -> DpEvent:
    if depth == 0:
        raise ValueError(f"the serialised event is nested more than {_DEPTH} deep")
    if not isinstance(node, dict) or not isinstance(node.get("kind"), str) or node["kind"] not in _FIELDS:
        kind = node.get("kind") if isinstance(node, dict) else node
        raise ValueError(f"{quote(kind)} is not a kind of event this package knows: {', '.join(_FIELDS)}")
    kind = node["kind"]
    if node.keys() - {"kind"} != _FIELDS[kind]:
        raise ValueError(f"a {kind} event has exactly these fields: {', '.join(sorted(_FIELDS[kind])) or 'none'}")
    if kind == "gaussian":
        return dp_event.GaussianDpEvent(_number(node["noise_multiplier"], "noise_multiplier"))
    if kind == "poisson_sampled":
        rate = _number(node["sampling_probability"], "sampling_probability")
        if rate > 1:
            raise ValueError(f"sampling_probability is {rate}: it must lie in [0, 1]")
        return dp_event.PoissonSampledDpEvent(rate, _from_json(node["event"], depth - 1))
    if kind == "self_composed":
        count = node["count"]
        if isinstance(count, bool) or not isinstance(count, int):
            raise ValueError(f"count is {count!r}: it must be a whole number")
        return dp_event.SelfComposedDpEvent(_from_json(node["event"], depth - 1), as_count(count, "count"))
    if kind == "composed":
        if not isinstance(node["events"], list):
            raise ValueError("the events of a composed event must be a list")
        return dp_event.ComposedDpEvent([_from_json(part, depth - 1) for part in node["events"]])
    if kind == "chosen":
        if not isinstance(node["alternatives"], list):
            raise ValueError("the alternatives of a chosen event must be a list")
        if any(isinstance(node[key], bool) or not isinstance(node[key], (int, float)) for key in ("shape", "stop")):
            raise ValueError("shape and stop of a chosen event must be numbers")
        return chosen([_from_json(part, depth - 1) for part in node["alternatives"]], node["shape"], node["stop"])
    return dp_event.NoOpDpEvent() if kind == "no_op" else dp_event.NonPrivateDpEvent()


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{what} is {value!r}: it must be a number")
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{what} is {number}: it must be finite and 0 or more")
    return number
