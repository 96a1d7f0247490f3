"""Progress of a run: the forecast of what is left, and the interface that a display implements."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Forecast:
    """What is still to come of a run.

    Attributes:
        steps: logical steps that are left.
        seconds: time that they will take: from a rehearsal of ordinary training, and later from the steps done.
        peak_bytes: most memory on the run's device: from the rehearsal, and at least what was seen.
        epsilon: most that a record's privacy costs when all is done; None where the guarantee is no epsilon.
        delta: the delta of that epsilon.
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
    """Receives a run's progress and shows nothing. The command line's subclass draws progress bars."""

    def phase(self, text: str) -> None:
        """A part of the run begins."""

    def note(self, text: str) -> None:
        """Something the user should know, such as examples that were cut."""

    def forecast(self, expected: Forecast) -> None:
        """Called before the first step."""

    def step(self, done: int, total: int, loss: float, epsilon: float | None, left: Forecast) -> None:
        """A logical step is done; `loss` is not protected by the guarantee."""
