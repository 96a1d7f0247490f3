"""What a run says of itself while it goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Forecast:
    """What is still to come of a run.

    Attributes:
        steps: logical steps that are left.
        seconds: that they will take; before the first step by a rehearsal of ordinary training, then by the steps done.
        peak_bytes: most memory that the run takes, on its device; by the rehearsal, and never below what was seen.
        epsilon: spent on a record when all is done, at most; None where the guarantee is no epsilon.
        delta: at which.
    """

    steps: int
    seconds: float
    peak_bytes: int
    epsilon: float | None
    delta: float

    def in_words(self) -> str:
        """One line, for before the first step."""
        found = [
            f"{self.steps} steps",
            f"about {duration(self.seconds)}" if self.seconds >= 1 else duration(self.seconds),
            f"peak memory about {memory(self.peak_bytes)}",
        ]
        if self.epsilon is not None:
            promised = f"epsilon {self.epsilon:g} at most, at delta {self.delta:g}"
            found.append(promised if math.isfinite(self.epsilon) else "no privacy")
        return ", ".join(found)


def duration(seconds: float) -> str:
    """As a person says it: 8 s, 3 min, 2 h 5 min."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 1 else "less than 1 s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def memory(size: int) -> str:
    """Bytes as MiB or GiB."""
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"


class Reporter:
    """Told what a run is doing; this one says nothing. The command line's draws progress bars."""

    def phase(self, text: str) -> None:
        """A part of the run begins."""

    def note(self, text: str) -> None:
        """Something the user should know, such as examples that were cut."""

    def forecast(self, expected: Forecast) -> None:
        """Told before the first step."""

    def step(self, done: int, total: int, loss: float, epsilon: float | None, left: Forecast) -> None:
        """A logical step is done; `loss` is not protected by the guarantee."""
