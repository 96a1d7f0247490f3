"""Tables of settings: each field with its help and what it may be, so that every source of values is checked in one way."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: So many names make a sentence too long.
_FEW = 12
#: The types of settings, in words.
TYPE_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a mapping such as {name: value}",
}


_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "above": (operator.gt, "greater than"),
    "least": (operator.ge, "at least"),
    "below": (operator.lt, "below"),
    "most": (operator.le, "at most"),
}


@dataclass(frozen=True)
class Allowed:
    """What a setting may be: one of some words, or a number within bounds, finite unless that is said not to be needed."""

    among: tuple[str, ...]
    bounds: Mapping[str, float]
    finite: bool

    def holds(self, value: Any) -> bool:
        """Whether a value is allowed. NaN never is."""
        if self.among or not self.bounds:
            return not self.among or value in self.among
        inside = all(_BOUNDS[name][0](value, bound) for name, bound in self.bounds.items())
        return inside and (math.isfinite(value) or not self.finite)

    def __str__(self) -> str:
        if self.among:
            return f"one of {', '.join(self.among)}"
        words = [f"{_BOUNDS[name][1]} {bound:g}" for name, bound in self.bounds.items()]
        return " and ".join(words + ["finite"] * (self.finite and len(words) == 1))


def setting(
    help: str, default: Any = None, *, among: tuple[str, ...] = (), finite: bool = True, **bounds: float
) -> Any:
    """A field of a table of settings, allowed ``among`` some words or within ``above``, ``least``, ``below`` and ``most``.

    ``help`` is a flag's; the words that it may be say enough where this is empty.
    """
    allowed = Allowed(among, bounds, finite)
    return dataclasses.field(default=default, metadata={"help": help or ", ".join(among), "allowed": allowed})


def check(table: Any, error: type[ValueError] = ValueError, *, only: Iterable[str] | None = None) -> None:
    """Raise ``error``, naming the first setting of a filled table (or of ``only`` some) that is not what it may be.

    None stands for a setting that was left out.
    """
    for field in dataclasses.fields(table):
        value, allowed = getattr(table, field.name), field.metadata["allowed"]
        if value is not None and (only is None or field.name in only) and not allowed.holds(value):
            raise error(f"{field.name} is {value!r}: it must be {allowed}")


def choices_of(table: type) -> dict[str, tuple[str, ...]]:
    """The words that settings of a table may be, where it is words."""
    among = {field.name: field.metadata["allowed"].among for field in dataclasses.fields(table)}
    return {name: words for name, words in among.items() if words}


def types_of(table: type) -> dict[str, type]:
    """The type of each setting of a table apart from None: one of `KINDS`."""
    found = {}
    hints = typing.get_type_hints(table)
    for field in dataclasses.fields(table):
        hint = hints[field.name]
        if isinstance(hint, types.UnionType):
            hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
        found[field.name] = typing.get_origin(hint) or hint
    return found


def suggest_name(name: str, known: Iterable[str], otherwise: str = "known settings:") -> str:
    """What to add to the refusal of an unknown name: the nearest known one, or all where they are few."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; {otherwise} {', '.join(known)}" if len(known) <= _FEW else f"; the documentation lists all {len(known)}"


def convert_value(name: str, value: Any, kinds: Mapping[str, type]) -> Any:
    """A value of a source that knows types, where a number may be written without its point.

    Raises:
        ValueError: if it is of another type.
    """
    kind = kinds[name]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{name} must be {TYPE_WORDS[kind]}, not {value!r}")
    return value
