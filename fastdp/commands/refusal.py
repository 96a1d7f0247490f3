"""How a command says no: one sentence on standard error and a non-zero exit."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer
from rich.console import Console

P = ParamSpec("P")
R = TypeVar("R")

errors = Console(stderr=True, soft_wrap=True)


def refusing(command: Callable[P, R]) -> Callable[P, R]:
    """Let a command end with its error's message instead of a traceback; FASTDP_TRACEBACK=1 shows the traceback."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return command(*args, **kwargs)
        except typer.Exit:
            # It is a RuntimeError too, whose text is its number: the command has said what there is to say.
            raise
        except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
            if os.environ.get("FASTDP_TRACEBACK"):
                raise
            message = str(error) or type(error).__name__
            errors.print(f"[bold red]error:[/] {_plain(message)}", highlight=False)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            errors.print("stopped", highlight=False)
            raise typer.Exit(130) from None

    return guarded


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    # Of the libraries' warnings only those meant for the user are worth a line between progress bars.
    if issubclass(category, UserWarning):
        errors.print(f"[yellow]warning:[/] {_plain(str(message))}", highlight=False)


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
