"""What the tables of settings share: a field with its help, and a value as the type that the field has."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any


def setting(help: str, default: Any) -> Any:
    """A field of a table of settings."""
    return dataclasses.field(default=default, metadata={"help": help})


def types_of(table: type) -> dict[str, type]:
    """The type of each setting of a table."""
    return {field.name: typing.get_type_hints(table)[field.name] for field in dataclasses.fields(table)}


def converted(name: str, value: Any, types: Mapping[str, type]) -> Any:
    """A value as Flower hands it over, where a number may be written without its point.

    Raises:
        ValueError: if it is of another type.
    """
    kind = types[name]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        wanted = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise ValueError(f"{name} must be {wanted}, not {value!r}")
    return value
