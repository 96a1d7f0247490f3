"""What customer and vendor say to each other: each operation's fields and tensors, both ways.

The customer asks, the vendor answers under the same name:

* ``describe``: what is served, and whether the customer has a run.
* ``bottom``: the bottom's weights, as a file.
* ``open``: begin a run, or take it up; asked again it changes nothing.
* ``put``: privatized rows of the next examples, to keep.
* ``forward``: logits of a batch of kept examples, for a step.
* ``backward``: the gradient of that step's logits; the vendor takes the step and keeps it.
* ``predict``: logits of privatized rows that are not kept.
* ``discard``: delete the run and everything kept of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastdp.split.wire import FLOAT_TYPES, Expect, MessageRejected, TensorSpec
from fastdp.untrusted import quote

VECTOR_TYPES = ("float32", "bfloat16", "float16")
#: JSON readers hold whole numbers exactly up to here.
_MAX_COUNT = 1 << 53
#: Loose: the limit on a payload's bytes binds first.
_MAX_ROWS = 1 << 40

#: Takes a field's name and value; raises `MessageRejected` for a value that the field may not have.
FieldCheck = Callable[[str, Any], None]


def _number(low: float, high: float, *kinds: type) -> FieldCheck:

    def check(name: str, value: Any) -> None:
        # Not isinstance: True is an int.
        if type(value) not in kinds or not low <= value <= high:
            raise MessageRejected(f"{name} must be a {'' if float in kinds else 'whole '}number from {low} to {high}")

    return check


def _integer(low: int, high: int) -> FieldCheck:
    return _number(low, high, int)


def _text(pattern: str) -> FieldCheck:

    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or re.fullmatch(pattern, value, re.DOTALL) is None:
            raise MessageRejected(f"{name} must be a text of the form {pattern}")

    return check


@dataclass(frozen=True)
class MessageForm:
    """Fields and tensors of a message; tensors of None arrive in a file."""

    fields: Mapping[str, FieldCheck]
    tensors: Mapping[str, TensorSpec] | None


@dataclass(frozen=True)
class ServiceDescription:
    """What a vendor serves, as ``describe`` tells it.

    Attributes:
        bottom: SHA-256 of the bottom's weights, in hex.
        vocabulary: SHA-256 of the model's vocabulary, in hex (`vocabulary_digest`), or nothing.
        width: of the hidden state.
        classes: of the output.
        after: blocks in the bottom.
        max_tokens: most tokens of an example.
        max_batch: most examples of a step, or of a message with rows.
        max_message_bytes: most bytes of a payload.
    """

    bottom: str
    vocabulary: str
    width: int
    classes: int
    after: int
    max_tokens: int
    max_batch: int
    max_message_bytes: int


HEX64 = _text("[0-9a-f]{64}")
DESCRIPTION_FIELDS: dict[str, FieldCheck] = {
    "bottom": HEX64,
    "vocabulary": _text("([0-9a-f]{64})?"),
    "width": _integer(1, 1 << 20),
    "classes": _integer(2, 1 << 16),
    "after": _integer(0, 1 << 12),
    "max_tokens": _integer(1, 1 << 20),
    "max_batch": _integer(1, 1 << 16),
    "max_message_bytes": _integer(1, 1 << 32),
}
RUN_FIELDS: dict[str, FieldCheck] = {
    "run": _text("[0-9a-f]{32}"),
    "bottom": HEX64,
    "classes": _integer(2, 1 << 16),
    "dtype": _text("|".join(VECTOR_TYPES)),
    "learning_rate": _number(1e-9, 10.0, int, float),
    "weight_decay": _number(0.0, 10.0, int, float),
    "seed": _integer(0, _MAX_COUNT - 1),
}
_STEP: dict[str, FieldCheck] = {"step": _integer(0, _MAX_COUNT)}
_EXAMPLES: dict[str, FieldCheck] = {"examples": _integer(0, _MAX_COUNT)}


def requests(served: ServiceDescription) -> dict[str, MessageForm]:
    """What the vendor accepts, by operation."""
    rows = TensorSpec(FLOAT_TYPES, ((1, _MAX_ROWS), served.width))
    lengths = TensorSpec((torch.int64,), ((1, served.max_batch),))
    gradient = TensorSpec((torch.float32,), ((1, served.max_batch), served.classes))
    return {
        "describe": MessageForm({}, {}),
        "bottom": MessageForm({}, {}),
        "open": MessageForm(RUN_FIELDS, {}),
        "put": MessageForm({"first": _integer(0, _MAX_COUNT)}, {"lengths": lengths, "rows": rows}),
        "forward": MessageForm(_STEP, {"indices": TensorSpec((torch.int64,), ((1, served.max_batch),))}),
        "backward": MessageForm(_STEP, {"gradient": gradient}),
        "predict": MessageForm({}, {"lengths": lengths, "rows": rows}),
        "discard": MessageForm({}, {}),
    }


def replies(served: ServiceDescription | None) -> dict[str, MessageForm]:
    """What the customer accepts, by operation. Without a description it can ask for that and for the bottom alone."""
    first = {
        "describe": MessageForm({**DESCRIPTION_FIELDS, "open": _integer(0, 1)}, {}),
        "bottom": MessageForm({"config": _text(".{2,60000}"), "after": _integer(0, 1 << 12)}, None),
    }
    if served is None:
        return first
    logits = TensorSpec((torch.float32,), ((1, served.max_batch), served.classes))
    return first | {
        "open": MessageForm({**_STEP, **_EXAMPLES}, {}),
        "put": MessageForm(_EXAMPLES, {}),
        "forward": MessageForm(_STEP, {"logits": logits}),
        "backward": MessageForm({**_STEP, "replayed": _integer(0, 1)}, {}),
        "predict": MessageForm({}, {"logits": logits}),
        "discard": MessageForm({}, {}),
    }


def expecting(forms: Mapping[str, MessageForm]) -> Expect:
    """The check of `receive` for messages of these forms."""

    def expect(op: str, fields: dict[str, Any]) -> Mapping[str, TensorSpec] | None:
        if op not in forms:
            raise MessageRejected(f"there is no operation {quote(op)} here: there are {', '.join(forms)}")
        form = forms[op]
        if set(fields) != set(form.fields):
            raise MessageRejected(f"{op} takes the fields {sorted(form.fields)}, not {quote(sorted(fields))}")
        for name, check in form.fields.items():
            check(name, fields[name])
        return form.tensors

    return expect
