"""What a run says of itself while it goes on."""

from __future__ import annotations


class Reporter:
    """Told what a run is doing; this one says nothing. The command line's draws progress bars."""

    def phase(self, text: str) -> None:
        """A part of the run begins."""

    def note(self, text: str) -> None:
        """Something the user should know, such as examples that were cut."""

    def step(self, done: int, total: int, loss: float, epsilon: float | None) -> None:
        """A logical step is done; `loss` is not protected by the guarantee."""
