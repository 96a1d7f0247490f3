"""What commands print, and how they refuse: one sentence on standard error and a non-zero exit."""

from __future__ import annotations

import errno
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from fastdp.untrusted import escape_controls

P = ParamSpec("P")
R = TypeVar("R")


class PlainConsole(Console):
    """A console on which a string is one line of plain text: no markup, no emoji codes, control characters escaped.

    Use `style_message` for colours.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """The string as text, wherever it stands: printed, in a table, or as its title."""
        return super().render_str(escape_controls(text), **options | {"markup": False, "emoji": False})


def style_message(*parts: str | tuple[str, str]) -> Text:
    """One line of strings and (string, style), each as plain as `PlainConsole` shows it."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((escape_controls(text), style) for text, style in pairs))


console, errors = PlainConsole(highlight=False), PlainConsole(stderr=True, soft_wrap=True, highlight=False)


def quiet_libraries() -> None:
    """Leave errors, and the warnings that Python's `warnings` carries; FASTDP_TRACEBACK=1 leaves everything."""
    if os.environ.get("FASTDP_TRACEBACK"):
        return
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


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
        except (ValueError, TypeError, OSError, RuntimeError, ImportError, OverflowError) as error:
            if os.environ.get("FASTDP_TRACEBACK"):
                raise
            message = _system(error) if isinstance(error, OSError) else str(error)
            message = " ".join(message.split()) or type(error).__name__
        except MemoryError as error:
            message = f"memory ran out: take fewer steps or examples ({error})"
        except KeyboardInterrupt:
            errors.print("stopped")
            raise typer.Exit(130) from None
        errors.print(style_message(("error:", "bold red"), f" {message}"))
        raise typer.Exit(1)

    return guarded


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    # Of the libraries' warnings only those meant for the user are worth a line between progress bars.
    if issubclass(category, UserWarning):
        errors.print(style_message(("warning:", "yellow"), f" {message}"))


def _system(error: OSError) -> str:
    """What the operating system refused, where, and what can be done about it."""
    if error.errno is None or not error.strerror:
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    remedy = _REMEDIES.get(error.errno, "")
    return f"{where}{error.strerror[0].lower()}{error.strerror[1:]}{remedy and f'; {remedy}'}"


#: What to do about each number of an error of the operating system.
_REMEDIES = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        "make room, or choose a folder on another disk; a run that has begun goes on with --resume",
    ),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its mode, or choose another place"),
    errno.EROFS: "choose a place that can be written",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "name a folder",
    errno.ENOENT: "check the name",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EEXIST: "choose another place",
}
