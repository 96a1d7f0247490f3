"""How a run ends: a warning where releases that were paid for were not made."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

from fastdp.accounting.ledger import Ledger

#: What to do about it, in a loop of one's own.
_LOOP = (
    "Count steps by private.last_step_done, not batches, and iterate until private.steps_done is private.total_steps, or plan "
    "fewer epochs."
)


class Ending:
    """Warn once if a run that was begun ends before all of its releases.

    It holds no run, so that it may be called when one was collected. ``tickets`` are the batches that were handed out and not
    trained on; ``counts`` says whether there is a budget, and whether this process is to speak of it; ``advice`` is what to do,
    in the words of whoever drives the run, and ``begun`` whether its loader was iterated.
    """

    def __init__(self, ledger: Ledger, tickets: Collection[Any], *, counts: bool):
        self._ledger, self._tickets, self._counts = ledger, tickets, counts
        self.advice, self.begun = _LOOP, False

    def __call__(self, stacklevel: int = 1) -> None:
        """The run ends, or what it made is handed on; ``stacklevel`` is whose line the warning names, this one's by default."""
        made, paid = self._ledger.spent_steps, self._ledger.budget_steps
        # A batch that was refused before any release is still there, and its error has said what to do.
        idle = not made and (bool(self._tickets) or not self.begun)
        if not self._counts or made >= paid or idle:
            return
        self.expect()
        warnings.warn(f"{made} of {paid} releases paid for were made. {self.advice}", stacklevel=stacklevel)

    def expect(self) -> None:
        """Say nothing: whoever ends the run knows, as where another process goes on with it."""
        self._counts = False
