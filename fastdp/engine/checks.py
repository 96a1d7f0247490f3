"""When a batch is looked at and how closely, before anything of it is released, and which route follows from it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import torch

from fastdp.engine import selfcheck
from fastdp.engine.batches import Call
from fastdp.engine.between import Between
from fastdp.engine.bits import DRAW
from fastdp.engine.collation import Collation
from fastdp.engine.errors import SelfCheckError, UnsupportedUse
from fastdp.engine.guard import Guard
from fastdp.engine.known import Known
from fastdp.engine.later import Schedule, Structure
from fastdp.engine.layout import Ticket
from fastdp.engine.modes import refuse_mixing
from fastdp.engine.passes import ORDINARY, USES, Pass, Passes
from fastdp.engine.ranks import Ranks
from fastdp.engine.trace import Tracer


class Checks:
    """Looks at the first batch as a whole, at calls of new shapes, at later batches at intervals, and at the loop between.

    Args:
        passes: of the model.
        guard: of the model.
        ranks: the processes that train together.
        enabled: compare the first micro-batch with one-at-a-time autograd, and look at later ones.
        batches: micro-batches that the run is planned to have; checks of later ones may take a hundredth of its time.
        on_route: told of the route, and why, once it is known.
    """

    def __init__(
        self,
        passes: Passes,
        guard: Guard,
        ranks: Ranks,
        *,
        enabled: bool,
        batches: int,
        on_route: Callable[[str, str | None], None],
    ):
        self.enabled = enabled
        self.between = Between(passes, enabled=enabled)
        self.schedule = Schedule(batches, passes.device)
        self._passes, self._guard, self._ranks, self._on_route = passes, guard, ranks, on_route
        self._structure = Structure(passes.model)
        self._foreseen: selfcheck.Foreseen | None = None
        #: Batches so far, and whether looks at two of their examples tell anything.
        self._handed, self._alike = 0, True
        self._tracer = Tracer(passes.model, passes.read, passes.vocabulary)
        self._known = Known(self._tracer, passes.forwards.root.plain)
        passes.explain = lambda call, rows: self._known.explain(passes.trace, call, rows)

    def before(self, call: Call, ticket: Ticket) -> bool:
        """Look at a batch before its own pass; whether any rank looked at its own."""
        passes, thorough, due = self._passes, False, False
        if passes.route == ORDINARY:
            return False
        if self.enabled:
            self._require_own_rows(ticket)
        first, stretched = passes.route is None, self.enabled and self._known.stretches(call)
        if not first and self.enabled:
            thorough = self._structure.changed() or self.schedule.affordable()
            due = self.schedule.due(ticket.rows) or thorough
            self.between.settled &= not thorough or self._ranks.size > 1
        looked = passes.weights.anyone(first or due or stretched or self._known.new(passes.trace, call, ticket.rows))
        if looked:
            with passes.weights.apart():
                if first:
                    with self.schedule.check():
                        self._prepare(call, _real(ticket))
                    self.schedule.begin(ticket.rows)
                else:
                    self._known.add(passes.trace, call, ticket.rows)
                    if due or stretched:
                        with self.schedule.check(brief=not thorough):
                            self._check_again(call, _real(ticket), thorough=thorough, due=due, stretched=stretched)
        self._look_between(call, ticket)
        return looked

    def explain(self, call: Call, ticket: Ticket) -> None:
        """Look at a batch that goes another way through the model than those before it, as the first batch was looked at.

        Raises `UnsupportedUse` where no trace explains that way, or rows on it have to be run alone.
        """
        passes, ticket = self._passes, _real(ticket)
        divided, asked = passes.divided, passes.asked
        if passes.trace is None or not self.enabled:
            raise UnsupportedUse("a batch goes where the first did not, and nothing is to be looked at")
        # A loop that goes on after a refusal finds nothing learned.
        with self.schedule.check(), passes.trial(), passes.trace.trying():
            try:
                self._known.explain(passes.trace, call, ticket.rows)
                rows = selfcheck.chosen_rows(ticket, random.SystemRandom().randrange(ticket.rows))
                rows = selfcheck.independence(passes, call, ticket, rows)
                if passes.divided != divided:
                    raise UnsupportedUse(
                        "the loss of a later batch is divided by its rows where the first one's is not, or otherwise"
                    )
                selfcheck.compare(passes, call, ticket, rows)
            except SelfCheckError as error:
                # Run alone, rows meet nobody, on this way or another.
                raise UnsupportedUse(str(error)) from error
            finally:
                passes.divided, passes.asked = divided, passes.asked | asked

    def after(self, waiting: Pass, *, explained: bool) -> None:
        """Look at what a batch's own pass by uses found: the shapes of its uses, and what was foreseen of it.

        Raises `Unseen` for one that is to be ``explained`` and made again.
        """
        passes, call, ticket = self._passes, waiting.call, waiting.ticket
        self._known.require(passes.trace, call, ticket.rows, waiting.tap, looked_at=explained)
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None and not foreseen.holds(waiting.tops):
            selfcheck.whole(passes, call, ticket, foreseen.rows)

    def try_loop(self, source: Collation, *, ahead: bool) -> None:
        """Have the loop tried before it begins, if a criterion stands outside the model or the loop takes batches ``ahead``."""
        between, passes = self.between, self._passes
        if not self.enabled or passes.route == ORDINARY or (passes.returns_loss and not ahead):
            return
        if not between.settled or (self._ranks.size == 1 and self.schedule.affordable()):
            between.first = ahead
            between.begin(source, len(source.indices))

    def _require_own_rows(self, ticket: Ticket) -> None:
        """See of two examples that data set and collator gave them what they give each of them alone.

        Two, so that one of them is not the example for whose sake all others are treated otherwise. On a GPU, which would
        wait, of the 1st, 2nd, 4th, 8th ... batch.
        """
        self._handed += 1
        source, rare = ticket.source, self._passes.device.type != "cpu"
        if not self._alike or source is None or len(source.indices) < 2 or (rare and self._handed & self._handed - 1):
            return
        self._alike = source.require_own(DRAW.sample(range(len(source.indices)), 2))

    def _look_between(self, call: Call, ticket: Ticket) -> None:
        """Have the loop tried if it makes something of a batch itself: on all ranks, at the same batch, or on none."""
        between, source = self.between, ticket.source
        # On a processor a batch that goes to the model untouched is known at once, and one that does not is new; of a loop that
        # changes every batch, or has a criterion, one is that holds more than all before it.
        again = between.settled and not between.waits and self._ranks.size == 1 and self._passes.device.type == "cpu"
        again = again and source is not None and (not between.made or between.passes_reach(source))
        if between.first or not self.enabled or (between.settled and not again):
            return
        asked = source is not None and ticket.token_units is None and ticket.rows > 1
        said = self._ranks.gather(
            (asked, asked and (again and not self._passes.returns_loss or between.makes(call, source)))
        )
        between.settled = all(could for could, _ in said)
        between.settled |= again
        if between.settled and any(makes for _, makes in said):
            between.begin(source, ticket.rows, whole=again)

    def _prepare(self, call: Call, ticket: Ticket) -> None:
        """Trace the model, see that its rows are independent, and try the route of uses on a few examples."""
        refuse_mixing(self._passes.model)
        self._guard.begin()
        with self._passes.trial():
            reason = self._decide(call, ticket)
        self._guard.require_settled()
        if reason is not None:
            self._passes.fall_back(reason, ticket)
        self._structure.changed()
        self._on_route(str(self._passes.route), reason)

    def _decide(self, call: Call, ticket: Ticket) -> str | None:
        """The reason why the one-example route is taken, or None; raises for a model that neither route serves."""
        passes = self._passes
        passes.trace = self._tracer.trace(passes.forwards.root.original, call, ticket.rows)
        passes.forwards.leave_out(passes.trace.heads)
        rows = selfcheck.chosen_rows(ticket)
        selfcheck.buffers(passes, self._guard, call, ticket)
        reason = passes.trace.conflict
        if reason is not None and not passes.trace.mapped:
            reason += _advice(passes.model)
        if self.enabled:
            try:
                selfcheck.collation(passes, call, ticket)
                rows = selfcheck.independence(passes, call, ticket, rows)
            except UnsupportedUse as error:
                reason = reason or str(error)
        reason = reason or self._try_uses(call, ticket, rows)
        if reason is not None and ticket.token_units is None:
            try:
                selfcheck.alone(passes, call, ticket, rows)
            except SelfCheckError:
                raise
            except Exception as error:
                raise ValueError(
                    f"no route serves this model: {reason}; and on one row alone it fails: {error}"
                ) from error
        return reason

    def _try_uses(self, call: Call, ticket: Ticket, rows: Sequence[int]) -> str | None:
        passes = self._passes
        try:
            passes.take_uses()
            if self.enabled:
                selfcheck.compare(passes, call, ticket, rows)
            else:
                passes.run_forward(call, ticket, verify=True)
            return None
        except (SelfCheckError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            passes.model.zero_grad(set_to_none=True)
            passes.forwards.unpatch()
            return str(error) or type(error).__name__

    def _check_again(self, call: Call, ticket: Ticket, *, thorough: bool, due: bool, stretched: bool) -> None:
        """What the first batch was asked, of some rows of a later one; without ``thorough``, one extra pass or two rows.

        Of a ``stretched`` one first whether its length matters, whether or not more is ``due``.
        """
        passes = self._passes
        if thorough:
            refuse_mixing(passes.model)
        rows = selfcheck.chosen_rows(ticket, random.SystemRandom().randrange(ticket.rows))
        try:
            # What one pass more leaves with the model the batch's own pass finds, which is compared with it.
            with passes.trial(memory=thorough or stretched):
                if thorough or stretched:
                    selfcheck.collation(passes, call, ticket, stretched=stretched)
                if not thorough:
                    self._foreseen = selfcheck.briefly(passes, call, ticket, rows) if due else None
                    return
                if passes.route == USES:
                    rows = selfcheck.independence(passes, call, ticket, rows)
                    selfcheck.compare(passes, call, ticket, rows)
        except UnsupportedUse as error:
            if passes.route == USES:
                passes.fall_back(str(error), ticket)


def _advice(model: torch.nn.Module) -> str:
    """What spares stock classifiers of transformers picking out the rows that have a label, or nothing."""
    kinds = [module for module in model.modules() if type(module).__name__.endswith("ForSequenceClassification")]
    if any(getattr(getattr(module, "config", None), "problem_type", "") is None for module in kinds):
        return (
            "; where every row has one label, model.config.problem_type = 'single_label_classification' leaves that out"
        )
    return ""


def _real(ticket: Ticket) -> Ticket:
    """The ticket, to be checked: a padding row that stands for an empty sample is looked at as if it were a unit's."""
    return (
        ticket if bool(ticket.weights.any()) else dataclasses.replace(ticket, weights=torch.ones_like(ticket.weights))
    )
