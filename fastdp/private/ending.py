"""How a run ends: a warning where releases that were paid for were not made."""

from __future__ import annotations

import warnings

from fastdp.accounting.ledger import Ledger

#: What to do about it, in a loop of one's own.
_LOOP = (
    "Count steps by private.last_step_done, not batches, and iterate until private.steps_done is private.total_steps, or plan "
    "fewer epochs."
)


class Ending:
    """Warn once if a run ends after some of its releases, but before all of them.

    It holds no run, so that it may be called when one was collected. ``counts`` says whether there is a budget, and whether this
    process is to speak of it; ``advice`` is what to do, in the words of whoever drives the run.
    """

    def __init__(self, ledger: Ledger, *, counts: bool):
        self._ledger, self._counts = ledger, counts
        self.advice = _LOOP

    def __call__(self, stacklevel: int = 1) -> None:
        """The run ends, or what it made is handed on; ``stacklevel`` is whose line the warning names, this one's by default."""
        made, paid = self._ledger.spent_steps, self._ledger.budget_steps
        if not self._counts or not 0 < made < paid:
            return
        self.expect()
        warnings.warn(f"{made} of {paid} releases paid for were made. {self.advice}", stacklevel=stacklevel)

    def expect(self) -> None:
        """Say nothing: whoever ends the run knows, as where another process goes on with it."""
        self._counts = False
