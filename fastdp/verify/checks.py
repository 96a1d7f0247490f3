"""When batches are verified, and which checks run: the first one, longer ones, and a public schedule afterwards."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from fastdp.calls.batches import Call, Inputs, as_long_as, take_rows, tensors
from fastdp.calls.collation import Collation
from fastdp.calls.flow import DataFlow
from fastdp.calls.modes import refuse_mixing
from fastdp.engine.errors import SelfCheckError, UnsupportedUse
from fastdp.engine.loss.boundary import Junction
from fastdp.engine.passes import ONE_EXAMPLE, ORDINARY, USES, Pass, Passes
from fastdp.engine.routing import Routing
from fastdp.engine.uses.layout import Ticket
from fastdp.verify.definition import UNDECIDED, check_alone, check_companions, check_definition, check_packed
from fastdp.verify.engine_check import check_engine
from fastdp.verify.loop import LoopCheck
from fastdp.verify.state import StateCheck

ISOLATED = (
    "units are independent by construction, as each was collated and run alone (isolation='per_example'), apart from state "
    "that the data set, the collator, the loop or attributes of the model keep"
)
LOOP_WRITES = "frozen parameters that the loop wrote between batches follow from released weights or public values"
#: Microbatches after which losses are compared again, and after which everything is checked again; each interval is twice the
#: one before. A comparison takes some 40% of a step, and all checks at most three steps.
BRIEF_AFTER, ALL_AFTER = 34, 600


class Checks(Routing):
    """Verifies batches before anything of them is released; rows and the engine only if ``enabled``, and state always.

    Attributes:
        state: of the model.
        loop: what verifies the training loop.
        assumptions: what could not be decided, in sentences for the card.
    """

    def __init__(self, passes: Passes, *, enabled: bool = True):
        super().__init__(passes)
        self.enabled = enabled
        self.state = StateCheck(passes.model, *((passes.weights.settle,) if passes.weights.cut else ()))
        self.loop = LoopCheck(passes)
        self.assumptions: dict[str, None] = {}
        if passes.isolated:
            # Buffers are restored after each example.
            self.state.harmless = frozenset(name for name, _ in passes.model.named_buffers())
            self.assumptions[ISOLATED] = None
        self._batches, self._brief, self._all, self._grew = 0, BRIEF_AFTER, ALL_AFTER, False
        #: The longest example, the largest difference of two in a batch, the most rows, the widest row and the largest input.
        self._reach: tuple[float, ...] = (0.0,) * 5

    @property
    def waiting_probes(self) -> int:  # type: ignore[override]
        return self.loop.waiting

    def before(self, call: Call, ticket: Ticket, inputs: Inputs) -> bool:
        """Verify a batch, if it is due, before its pass."""
        if self.passes.route is None:
            # Between two stages of a method only releases may change the model.
            self.state.require_parameters()
            self.state.settle()
        self._batches += 1
        self._grew = self.enabled and self._grows(ticket, inputs)
        checked = super().before(call, ticket, inputs)
        if checked:
            self.state.accept_buffers()
        return checked

    def watching(self) -> AbstractContextManager[None]:
        """Raise `SelfCheckError` if a training pass writes a saved buffer or, after the first, a frozen parameter meanwhile."""
        return self.state.forward(frozen=self._batches > 1)

    @contextmanager
    def tracing(self, call: Call, ticket: Ticket) -> Iterator[None]:
        """Learn which state the trace writes."""

        def again(data: int) -> DataFlow:
            # Two batches of other rows, in other numbers: state that they write alike follows from no data.
            rows = [[0, 1 % ticket.rows], [ticket.rows - 1, 0, 0]][data]
            args, kwargs = take_rows(call, torch.tensor(rows), as_long_as(call, ticket.rows))
            with torch.no_grad(), DataFlow(tensors((args, kwargs))) as followed:
                self.passes.plain_forward(*args, **kwargs)
            return followed

        with self.state.tracing(again):
            yield
        self.passes.derived_buffers = self.state.harmless
        self.state.settle()

    def due(self, call: Call, ticket: Ticket) -> str:
        """What a later batch is verified for: a longer example, more padding, NaN, changed modules, or by the schedule."""
        if not self.enabled:
            return ""
        full = (ticket.is_last and self.state.structure_changed()) or self._batches > self._all
        brief = self._batches > self._brief
        self._all, self._brief = self._all * (1 + (self._batches > self._all)), self._brief * (1 + brief)
        self.loop.begun = self.loop.begun and not full
        return "everything" if full else "gradients" if self._grew else "losses" if brief else ""

    def _grows(self, ticket: Ticket, inputs: Inputs) -> bool:
        """Whether a batch has a longer example or row, other padding, more rows, NaN or an input twice as large as before."""
        lengths, largest = ticket.lengths or (0,), 0.0
        # A GPU is not asked for the size of inputs, as the host would have to wait.
        if self.passes.device.type == "cpu":
            held = [t for _, t in inputs] if ticket.source is None else ticket.source.batch.values()
            sizes = [float(t.detach().abs().max()) for t in held if t.is_floating_point() and t.numel()]
            largest = max(sizes, default=0.0) if all(map(math.isfinite, sizes)) else math.nan
        widest = max([t.numel() // max(t.shape[0], 1) for _, t in inputs if t.dim()], default=0)
        longest, before = max(lengths), self._reach
        now = longest, longest - min(lengths), ticket.rows, widest, largest
        if False not in map(operator.le, now, before):
            return False
        self._reach = tuple(b if n != n else max(b, n) for b, n in zip(before, now))
        larger = not now[-1] <= 2 * before[-1]
        return ticket.rows > 1 and (larger or now[:-1] != tuple(map(min, now[:-1], before[:-1])))

    def verify_rows(self, call: Call, ticket: Ticket) -> None:
        """The definition check and the companion check of the first batch, or of one that takes another path."""
        if not self.enabled:
            return
        self.state.structure_changed()
        if ticket.token_units is not None:
            check_packed(self.passes, call, ticket)
            return
        passes, rows = self.passes, ticket.chosen_rows()
        found, base = check_definition(passes, call, ticket, rows, gradients=passes.returns_loss)
        self.assumptions |= dict.fromkeys(found)
        check_companions(passes, call, ticket, base)

    def verify_engine(self, call: Call, ticket: Ticket) -> None:
        """The engine check, on two rows."""
        if self.enabled:
            check_engine(self.passes, call, ticket, ticket.chosen_rows())
        else:
            super().verify_engine(call, ticket)

    def verify_alone(self, call: Call, ticket: Ticket) -> None:
        check_alone(self.passes, call, ticket, ticket.chosen_rows())

    def verify_later(self, call: Call, ticket: Ticket, due: str) -> None:
        """The same checks of a later batch; of one that is only longer, the definition check; by the schedule, its losses."""
        passes, rows = self.passes, ticket.chosen_rows()
        try:
            with passes.trial():
                if ticket.token_units is not None:
                    check_packed(passes, call, ticket)
                elif passes.route == ONE_EXAMPLE:
                    check_alone(passes, call, ticket, rows)
                elif due == "everything":
                    refuse_mixing(passes.model)
                    self.verify_rows(call, ticket)
                    self.verify_engine(call, ticket)
                elif passes.returns_loss or due == "losses":
                    found, _ = check_definition(passes, call, ticket, rows, gradients=due == "gradients")
                    self.assumptions |= dict.fromkeys(found)
        except (SelfCheckError, UnsupportedUse) as error:
            if passes.route == USES and isinstance(error, SelfCheckError):
                # Losses of a batch that goes another way than the first are not told apart by the first's trace.
                error = self.traced.difference(call, ticket.rows) or error
            # Own sums whose coefficients follow from a batch have none for rows that are run alone.
            if isinstance(error, SelfCheckError) and not passes.reductions:
                raise error
            if passes.route == USES:
                passes.fall_back(str(error), ticket)

    def verify_pass(self, waiting: Pass) -> None:
        """The losses of rows that are not finite: a row that is so alone must not reach others. A GPU is not asked."""
        passes, ticket = self.passes, waiting.ticket
        rows = ticket.rows > 1 and ticket.token_units is None and passes.returns_loss and not passes.weights.cut
        if not (self.enabled and rows and passes.device.type == "cpu" and waiting.tops[0].shape[0] == ticket.rows):
            return
        lost = [row for row, loss in enumerate(waiting.tops[0].tolist()) if not math.isfinite(loss)]
        if lost:
            with passes.trial():
                check_definition(passes, waiting.call, ticket, sorted({lost[0], lost[-1]}), gradients=False)
            self.state.accept_buffers()

    def verify_terms(self, call: Call, ticket: Ticket) -> None:
        """Run the engine check with the terms that a loop's loss now has beside the model's, and plan probe batches."""
        if self.enabled and self.passes.route == USES:
            with self.passes.weights.apart(), self.passes.trial(), torch.enable_grad():
                self.verify_engine(call, ticket)
        known = self.loop.waiting or self.loop.mixes or not self.passes.probes_come()
        if self.enabled and ticket.source is not None and not known:
            self.loop.begin(ticket.source, ticket.rows)

    def verify_loop(self, call: Call, ticket: Ticket) -> None:
        """Plan probe batches if the loop makes something of a batch, or computes the loss itself: on all ranks or on none."""
        passes, source, loop = self.passes, ticket.source, self.loop
        verified = self.enabled and source is not None and ticket.token_units is None
        if not verified or loop.waiting or not passes.probes_come():
            return
        # A loop that begins to call the model twice is verified again.
        loop.twice |= (again := passes.twice() and not loop.twice)
        again |= passes.penalty.waits
        if self._batches > 1 and not again and (passes.ranks.size > 1 or passes.device.type != "cpu"):
            return
        due = self._grew or again or not loop.begun
        needs = due and (not passes.returns_loss or passes.mixes or passes.penalty.expected or source.makes(call))
        if needs if passes.ranks.size == 1 else any(passes.ranks.gather(needs)):
            loop.begin(source, max(ticket.rows, 1 + passes.penalty.waits))

    def plan_ahead(self, source: Collation, rows: int) -> None:
        """Plan probe batches before the first batch, for a loop that takes batches ahead."""
        passes = self.passes
        if self.enabled and not (self.loop.begun or passes.isolated or passes.route == ORDINARY):
            self.loop.begin(source, rows, ahead=True)

    def run_probe(self, call: Call, ticket: Ticket, junction: Junction) -> Any:
        output = self.loop.run_forward(call, ticket, junction)
        self.state.accept_buffers()
        return output

    def run_deferred_checks(self) -> None:
        super().run_deferred_checks()
        self.state.accept_buffers()

    def abandon(self) -> None:
        self.loop.forget()

    def sentences(self) -> list[str]:
        """What was assumed, for the card."""
        found = dict.fromkeys([UNDECIDED] * self.loop.undecided + [LOOP_WRITES] * self.state.frozen_written)
        return [*(self.assumptions | found)]
