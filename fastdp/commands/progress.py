"""A bar of progress on the commands' console."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fastdp.commands.refusal import console


@contextmanager
def bar(title: str, state: str = "", *, transient: bool = False) -> Iterator[Callable[..., None]]:
    """Gives the function that moves it: to how many are done, of how many, and how they stand, in words.

    A ``transient`` one goes once all is done.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=transient) as progress:
        task = progress.add_task(title, total=None, state=state)

        def move(done: int, total: int, state: str = state) -> None:
            progress.update(task, completed=done, total=total, state=state)

        yield move
