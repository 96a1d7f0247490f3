"""A run as its loader sees it: whether a step is due, how many are left, and the probe batches of its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import fastdp.accounting as accounting
from fastdp.calls.collation import Collation, ProbeBatch
from fastdp.private.loader import LoaderOwner
from fastdp.private.stages import Stages
from fastdp.verify import Checks

#: Microbatches by which one is replayed, where any will be.
_REPLAYED_BY = 32
_ACCUMULATES = (
    "step() of make_private's optimizer did not follow backward(). Call it after each; to accumulate, set the DataLoader's "
    "batch_size to the accumulated batch."
)


class RunOwner(LoaderOwner):
    """A run, as its loader sees it.

    It does ``begin`` when its loader is iterated anew, and ``begin_batch`` before each logical batch.
    """

    def __init__(self, stages: Stages, begin: Callable[[], None], begin_batch: Callable[[], None]):
        self._stages, self._begin, self._begin_batch = stages, begin, begin_batch

    @property
    def _checks(self) -> Checks:
        return cast(Checks, self._stages.engine.checks)

    @property
    def evaluates(self) -> bool:
        return not self._stages.model.training

    @property
    def records_passes(self) -> bool:
        """Whether microbatches are replayed, or may come to be: then padding them to few shapes pays."""
        engine, graphs = self._stages.engine, self._stages.engine.graphs
        return graphs is not None and graphs.open and (graphs.replays > 0 or engine.backwards < _REPLAYED_BY)

    @property
    def computes_loss(self) -> bool:
        """Whether the loop computes the loss of the model's outputs, or may do so before the first batch tells."""
        return self._stages.engine.loss_reduction is not None

    def steps_left(self, epoch: int) -> int:
        spent, budget = self._stages.ledger.spent_steps, self._stages.ledger.budget_steps
        if spent >= budget:
            raise accounting.BudgetExceeded(
                f"all {budget} budgeted steps are spent; call private.extend(epochs) to train on and pay for it"
            )
        return min(epoch, budget - spent)

    def begin_iteration(self) -> None:
        self._begin()

    def begin_microbatch(self) -> None:
        engine = self._stages.engine
        if engine.backwards > engine.followed:
            raise RuntimeError(_ACCUMULATES)
        if not engine.begun:
            self._begin_batch()

    def plan_probes(self, source: Collation, rows: int) -> None:
        self._stages.engine.takes_ahead = True
        self._checks.plan_ahead(source, rows)

    def take_probes(self) -> Iterable[ProbeBatch]:
        return self._checks.loop.take()
