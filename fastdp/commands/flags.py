"""Commands that share flags: each takes those of a table, and gets them as one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import typer

from fastdp.finetune.config import CHOICES

Command = Callable[..., None]


def choice_of(name: str) -> Any:
    """A flag for a setting of `fastdp finetune` that is one of some words."""
    choices = CHOICES[name]

    def chosen(value: str) -> str:
        if value not in choices:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(repr, choices))}.")
        return value

    return typer.Option(parser=chosen, metavar=name.upper(), help=", ".join(choices))


def with_flags(
    flags: Sequence[inspect.Parameter], into: str, make: Callable[..., Any] = dict
) -> Callable[[Command], Command]:
    """Give a command these flags behind its own; what ``make`` makes of their values, by name, is its argument ``into``."""

    def decorated(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters
        parameters = [own[name] for name in own if name != into]

        def wrapper(**arguments: Any) -> None:
            command(**{into: make(**{flag.name: arguments.pop(flag.name) for flag in flags})}, **arguments)

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = inspect.Signature([*parameters, *flags])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in (*parameters, *flags)}
        return wrapper

    return decorated
