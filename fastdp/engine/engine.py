"""The engine: joins a model's forward and backward passes to accumulator and release, one micro-batch at a time."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from fastdp.engine import selfcheck
from fastdp.engine.accumulator import Accumulator
from fastdp.engine.batches import Call, as_long_as, map_tensors, tensors
from fastdp.engine.between import CRITERION, Between, Company
from fastdp.engine.boundary import LossBoundary, OutputBoundary, caught, find_loss, replace_loss
from fastdp.engine.chance import secretly
from fastdp.engine.collation import Collation, values
from fastdp.engine.errors import SelfCheckError, UnsupportedUse
from fastdp.engine.forwards import PatchedForward, RootCall, RootForward
from fastdp.engine.guard import Guard
from fastdp.engine.known import Known, wrong_rows
from fastdp.engine.later import Schedule, Structure
from fastdp.engine.layout import Layout, Ticket
from fastdp.engine.logits import VOCABULARY
from fastdp.engine.losses import LossTerms, combine, intercepted, masked_mean
from fastdp.engine.one_example import NO_LOSS, merged, rows_alone
from fastdp.engine.pieces import is_cut
from fastdp.engine.policy import Policy, Unclipped
from fastdp.engine.ranks import ONE, Ranks
from fastdp.engine.reads import Reads
from fastdp.engine.replay import Replay, devices, still, unchanged
from fastdp.engine.shards import weights_of
from fastdp.engine.trace import Trace, Tracer
from fastdp.engine.uses import Sink, Tap

#: How per-example gradients are obtained.
USES, ONE_EXAMPLE, ORDINARY = "uses", "one-example", "ordinary"
#: Whole gradients that take less than this share of the model's own memory are cheaper than a second backward pass.
_INSTANCES = 0.125


@dataclasses.dataclass
class Pass:
    """One forward pass that waits for its backward: what to differentiate, and for whom."""

    ticket: Ticket
    layout: Layout
    backward: Callable[[Any, bool], None]
    tap: Tap
    verify: bool
    call: Call
    used: bool = False


class Engine:
    """Per-example gradients of a model's trained parameters, clipped and summed as a policy says.

    Args:
        model: the user's model; only the `forward` attribute of some of its modules is patched, and only until `close`.
        policy: the method's decisions.
        tickets: the loader's queue: a forward pass reads its head, the backward pass removes it.
        loss_reduction: "mean" or "sum" over the rows, for a criterion outside the model; None for a model that returns
            its loss.
        two_pass: run the backward pass twice and keep no factors; None does so where checkpointing is on, unless the units'
            whole gradients are small beside the model, and are kept instead (LoRA's).
        check: compare the first micro-batch with one-at-a-time autograd before anything is released.
        accumulator: takes the captures instead of an `Accumulator`, for other sums of per-example gradients than clipped ones.
        on_route: told of the route, and why, once it is known.
        batches: micro-batches that the run is planned to have; checks of later ones may take a hundredth of its time.
        keep_logits: compute the logits of a vocabulary as a whole, so that they may be read beside the loss; False never does,
            None where that is faster.
        ranks: the processes that train together.
        secret: let nobody know what a training pass draws by chance (`fastdp.engine.chance`).
    """

    #: The fewest rows of a matrix that counts as a vocabulary's head.
    vocabulary: int | None = VOCABULARY

    def __init__(
        self,
        model: torch.nn.Module,
        policy: Policy,
        tickets: deque[Ticket],
        *,
        loss_reduction: str | None = None,
        two_pass: bool | None = None,
        check: bool = True,
        accumulator: Accumulator | None = None,
        on_route: Callable[[str, str | None], None] = lambda route, reason: None,
        batches: int = 0,
        keep_logits: bool | None = None,
        ranks: Ranks = ONE,
        secret: bool = False,
    ):
        self.model = model
        self.chance = partial(secretly, devices(model)) if secret else nullcontext
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights = weights_of(model, ranks)
        #: The same as modules read them in a pass.
        self.read = self.weights.read(self.parameters)
        self.accumulator = accumulator or Accumulator(self.read, policy)
        self.accumulator.read(self.read, self.weights)
        self.device = next(iter(self.read.values())).device
        self.tickets = tickets
        self.loss_reduction = loss_reduction
        self.two_pass = two_pass
        self.check = check
        self.on_route = on_route
        if keep_logits or not self.returns_loss or self.weights.cut:
            self.vocabulary = None
        self.ranks = ranks
        self.route: str | None = ORDINARY if isinstance(policy, Unclipped) else None
        self.reason: str | None = None
        self.trace: Trace | None = None
        self.reads = Reads(self.read)
        self.reads.heads.always = keep_logits is False
        self.expected: Counter[str] = Counter()
        self.complete = False
        #: Whether a backward pass of this logical batch failed, perhaps after it had added something.
        self.broken = False
        self._ended = False
        self.backwards = 0
        self.between = Between()
        self.guard = Guard(model, self.weights.settle)
        #: The model's loss functions whose coefficient it divides by the number of rows.
        self.divided: frozenset[int] = frozenset()
        #: Where the model was seen to ask the host about data.
        self.asked: frozenset[str] = frozenset()
        self._again = Schedule(batches, self.device)
        self._structure = Structure(model)
        self._foreseen: selfcheck.Foreseen | None = None
        self._own_bytes: int | None = None
        #: The modules that may be checkpointed, once that was asked.
        self._switches: list[Any] | None = None
        self._patches: dict[str, PatchedForward] = {}
        self._preparing = False
        self._root: RootForward | RootCall
        if self.weights.cut:
            self._root = RootCall(model, self.forward, self.weights)
        else:
            self._root = RootForward(model, self.forward)
        self._tracer = Tracer(model, self.read, self.vocabulary)
        self._known = Known(self._tracer, self._root.plain)

    def plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward pass, with nothing intercepted but the logits of heads, left out."""
        with self.reads.heads.open():
            return self._root.plain(*args, **kwargs)

    def close(self) -> None:
        """Give the model its own forwards back."""
        self._unpatch()
        self._root.remove()
        self.weights.release()

    def abandon(self) -> None:
        """Forget a logical batch that was begun and not released: the loader starts anew."""
        self.accumulator.reset()
        self.between.forget()
        self.complete = self.broken = self._ended = False

    def forward(self, args: Any, kwargs: Any) -> Any:
        """A training forward pass on the micro-batch at the head of the queue."""
        self.ranks.enter()
        if not self.weights.cut and (
            hasattr(self.model, "reshard") or (self.route is None and any(map(is_cut, self.model.parameters())))
        ):
            raise RuntimeError(
                "fully_shard was called after make_private, and nothing would clip what it gathers: call it first, then build "
                "the optimizer, then call make_private"
            )
        if not self.tickets:
            raise RuntimeError(
                "no batch is outstanding: iterate over the data_loader that make_private returned, and use "
                "model.eval() with torch.no_grad() to evaluate"
            )
        ticket, call = self.tickets[0], (args, kwargs)
        if ticket.company is not None:
            return self._try_loop(call, ticket)
        if not as_long_as(call, ticket.rows):
            raise ValueError(wrong_rows(call, ticket.rows))
        with self.chance():
            return self._checked_forward(call, ticket)

    def _checked_forward(self, call: Call, ticket: Ticket) -> Any:
        """The pass itself, after what has to be looked at before it; what it draws, a look ahead has drawn too."""
        self.weights.settle()
        verify, thorough, due, looked = self.route is None, False, False, False
        if self.route != ORDINARY:
            if not verify and self.check:
                thorough = self._structure.changed() or self._again.affordable()
                due = self._again.due(ticket.rows) or thorough
                self.between.settled &= not thorough or self.ranks.size > 1
            looked = self.weights.anyone(verify or due or self._known.new(self.trace, call, ticket.rows))
        if looked:
            with self.weights.apart():
                if verify:
                    with self._again.check():
                        self._prepare(call, _real(ticket))
                    self._again.begin(ticket.rows)
                else:
                    self._known.add(self.trace, call, ticket.rows)
                    if due:
                        with self._again.check(brief=not thorough):
                            self._check_again(call, _real(ticket), thorough=thorough)
        self._look_between(call, ticket)
        with self.guard.forward() if self.route != ORDINARY else nullcontext():
            try:
                return self.run_forward(*call, ticket, verify=verify or self.backwards == 0, looked=looked)
            except (SelfCheckError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if self.route != USES:
                    raise
                self._fall_back(str(error), ticket)
                return self.run_forward(*call, ticket, verify=True)

    @property
    def returns_loss(self) -> bool:
        """Whether the model's output holds the loss to differentiate."""
        return self.loss_reduction is None

    def scale(self, ticket: Ticket) -> float:
        """What a criterion outside the model divided its gradient by."""
        return float(ticket.rows) if self.loss_reduction == "mean" else 1.0

    def replay(self, call: Call, ticket: Ticket) -> Replay:
        """This call, to be run again in other company. Needs a trace."""
        assert self.trace is not None
        return Replay(
            self.model,
            self.plain_forward,
            call,
            self.trace.carriers,
            ticket,
            returns_loss=self.returns_loss,
            divided=self.divided,
            mapped=self.trace.mapped,
            weights=self.weights,
        )

    def _layout(self, ticket: Ticket) -> Layout:
        layout = ticket.layout(self.device)
        layout.meetings = self.trace.meetings if self.trace is not None else {}
        return layout

    def run_forward(self, args: Any, kwargs: Any, ticket: Ticket, *, verify: bool, looked: bool = False) -> Any:
        """The forward pass by the chosen route, its loss or outputs replaced by a boundary.

        ``looked`` says that ranks looked at this batch before.
        """
        layout = self._layout(ticket)
        if self.route == ONE_EXAMPLE:
            return self._one_at_a_time((args, kwargs), ticket, layout)
        tap = Tap(layout)
        output, tops = self._tops(args, kwargs, layout, tap, verify=verify)
        if self.route == USES and not self._preparing:
            with self.weights.apart() if looked else nullcontext():
                self._known.require(self.trace, (args, kwargs), ticket.rows, tap)
                foreseen, self._foreseen = self._foreseen, None
                if foreseen is not None and not foreseen.holds(tops):
                    selfcheck.whole(self, (args, kwargs), ticket, foreseen.rows)

        def backward(upstream: Any, retain: bool) -> None:
            if self.returns_loss:
                # A unit that takes no part sends back exact zeros; its weight of 0 then selects it out of every sum.
                pairs = [(tops[0], (layout.weights > 0).to(tops[0].dtype))]
            else:
                pairs = [(t, g * self.scale(ticket)) for t, g in zip(tops, upstream) if g is not None]
            with self.weights.gathered():
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs], retain_graph=retain)

        waiting = Pass(ticket, layout, backward, tap, verify, (args, kwargs))
        if not self.returns_loss:
            return self._outputs(output, tops, waiting)
        return replace_loss(output, self._loss(masked_mean(tops[0].detach(), layout.weights), waiting))

    def tops(self, args: Any, kwargs: Any, ticket: Ticket) -> list[torch.Tensor]:
        """What a backward pass on a call would start from, by the route of uses: units' losses ``[units]``, or outputs."""
        layout = self._layout(ticket)
        return self._tops(args, kwargs, layout, Tap(layout), verify=True)[1]

    def _tops(
        self, args: Any, kwargs: Any, layout: Layout, tap: Tap, *, verify: bool
    ) -> tuple[Any, list[torch.Tensor]]:
        """A forward pass by the route of uses, and what its backward pass starts from: units' losses ``[units]``, or outputs."""
        terms = LossTerms(layout)
        self.reads.tap = tap if self.route == USES else None
        try:
            with intercepted(terms):
                output = self._root.original(*args, **kwargs)
        finally:
            self.reads.tap = None
            self.reads.heads.close()
        if not self.returns_loss:
            return output, _outer(output)
        total = find_loss(output)
        if total is None:
            raise ValueError(NO_LOSS)
        tap.shapes |= {("a loss function", (count,)) for count in terms.tokens}
        try:
            return output, [combine(total, terms, self.divided, verify=verify)]
        except UnsupportedUse:
            if self.route != ORDINARY:
                raise
            # Nothing is clipped: the mean over the rows stands for each of them.
            return output, [total.expand(layout.units)]

    def capture(self, args: Any, kwargs: Any, ticket: Ticket, unit: int, sink: Sink) -> None:
        """Hand a sink what a backward pass from one unit's loss (or outputs) alone captures."""
        layout = self._layout(ticket)
        tap = Tap(layout)
        _, tops = self._tops(args, kwargs, layout, tap, verify=True)
        tap.sink = sink
        self.reads.tap = tap
        try:
            seeds = [torch.zeros_like(t).index_fill_(0, torch.tensor(unit, device=t.device), 1) for t in tops]
            with self.weights.gathered():
                torch.autograd.backward(tops, seeds)
        finally:
            self.reads.tap = None
        self._refuse_foreign_gradients("in the backward pass")

    def _loss(self, value: torch.Tensor, waiting: Pass) -> torch.Tensor:
        def enter(upstream: torch.Tensor) -> None:
            if (waiting.verify or upstream.device.type == "cpu") and not float(upstream) > 0:
                raise ValueError(
                    f"the loss was scaled by {float(upstream)} before backward(): scales are divided out, so it must be "
                    "positive; change the sign inside the model's loss"
                )
            self._backward(waiting, upstream)

        anchor = torch.zeros((), device=value.device, requires_grad=True)
        return LossBoundary.apply(anchor, value, enter)

    def _outputs(self, output: Any, found: list[torch.Tensor], waiting: Pass) -> Any:
        anchor = torch.zeros((), device=found[0].device, requires_grad=True)
        outer = OutputBoundary.apply(anchor, lambda upstream: self._backward(waiting, upstream), found)
        replaced = {id(t): o for t, o in zip(found, outer)}
        return map_tensors(output, lambda t: replaced.get(id(t), t))

    def _look_between(self, call: Call, ticket: Ticket) -> None:
        """Have the loop tried if it makes something of a batch itself: on all ranks, at the same batch, or on none."""
        between, source = self.between, ticket.source
        if between.settled or between.first or not self.check or self.route == ORDINARY:
            return
        asked = source is not None and ticket.token_units is None and ticket.rows > 1
        said = self.ranks.gather((asked, asked and between.makes(call, source)))
        between.settled = all(could for could, _ in said)
        if between.settled and any(makes for _, makes in said):
            between.begin(source, self.model, ticket.rows)

    def try_loop(self, source: Collation, *, ahead: bool) -> None:
        """Have the loop tried before it begins, if a criterion stands outside the model or the loop takes batches ``ahead``."""
        between = self.between
        if not self.check or self.route == ORDINARY or (self.returns_loss and not ahead):
            return
        if not between.settled or (self.ranks.size == 1 and self._again.affordable()):
            between.first = True
            between.begin(source, self.model, len(source.indices))

    def _try_loop(self, call: Call, ticket: Ticket) -> Any:
        """A pass without randomness of which only the call is looked at, and what a criterion sends back; nothing is summed."""
        company: Company = ticket.company
        self.between.note(dict(values(call, single=False)), company, self.model)
        if self.between.first and self.returns_loss and not self.between.makes(call, company.source):
            self.between.spare()
        with self.weights.apart(), unchanged(self.model), still(self.model):
            output = self._root.plain(*call[0], **call[1])

        def backward(upstream: Any, _retain: bool) -> None:
            if not self.returns_loss:
                sent = {(CRITERION, i): g * self.scale(ticket) for i, g in enumerate(upstream) if g is not None}
                self.between.note(sent, company, self.model)
            self.between.done()

        layout = ticket.layout(self.device)
        waiting = Pass(ticket, layout, backward, Tap(layout), True, call)
        if not self.returns_loss:
            output = map_tensors(output, lambda t: t.nan_to_num() if t.requires_grad and t.is_floating_point() else t)
            return self._outputs(output, _outer(output), waiting)
        loss = find_loss(output)
        if loss is None:
            raise ValueError(NO_LOSS)
        return replace_loss(output, self._loss(loss.detach().nan_to_num(), waiting))

    def _backward(self, waiting: Pass, upstream: Any) -> None:
        if waiting.used:
            raise RuntimeError(
                "a second backward() on one batch: each batch of the private loader may be differentiated once"
            )
        waiting.used = True
        if not self._preparing:
            if not self.tickets or self.tickets[0] is not waiting.ticket:
                raise RuntimeError("backward passes must come in the order in which the loader handed out the batches")
            if self.complete:
                raise RuntimeError(
                    "a logical batch is complete and optimizer.step() has not been called; call it after every backward()"
                )
            if self.broken:
                raise RuntimeError(
                    "a backward pass of this logical batch failed after it may have added examples, and they would count "
                    "twice: start the loader's iteration anew, which discards the logical batch that was begun"
                )
            self._refuse_foreign_gradients("before the backward pass")
            self.broken = True
        self.differentiate(waiting, upstream)
        if self._preparing:
            return
        self.broken = False
        self.backwards += 1
        self.tickets.popleft()
        self._ended |= waiting.ticket.is_last
        self.complete = self._ended and not self.between.waits
        self._ended &= not self.complete

    def differentiate(self, waiting: Pass, upstream: Any) -> None:
        """Run the backward pass of one micro-batch into the accumulator."""
        two_pass, instances = self._passes(waiting.layout)
        self.reads.tap = waiting.tap if self.route == USES else None
        try:
            if waiting.ticket.company is not None:
                waiting.backward(upstream, False)
            elif self.route == ORDINARY:
                names = list(self.read)
                with caught(self.read.values(), lambda i, g: self.accumulator.add_gradient(names[i], g)):
                    waiting.backward(upstream, False)
                self.accumulator.units = self.accumulator.units + (waiting.layout.weights > 0).sum()
            elif self.route == ONE_EXAMPLE:
                waiting.backward(upstream, False)
            else:
                with selfcheck.repeatable(self.model) if two_pass else nullcontext():
                    self.accumulator.run(
                        lambda retain: waiting.backward(upstream, retain),
                        lambda sink: setattr(waiting.tap, "sink", sink),
                        waiting.layout,
                        self.expected,
                        two_pass=two_pass,
                        instances=instances,
                    )
                self._refuse_foreign_gradients("in the backward pass")
        except UnsupportedUse as error:
            # Nothing has been added yet: captures are refused before the first norm is used.
            if self._preparing or not self.returns_loss:
                raise
            self._fall_back(str(error), waiting.ticket)
            with torch.enable_grad(), self.chance():
                _, _, backward = rows_alone(self, waiting.call, waiting.ticket, waiting.layout)
            backward(upstream, False)
        finally:
            self.reads.tap = None
            waiting.tap.close()

    def _passes(self, layout: Layout) -> tuple[bool, bool]:
        """Whether to run the backward pass twice, and whether to keep whole gradients, which are small where few train."""
        if self.two_pass is not None:
            return self.two_pass, False
        if self._switches is None:
            self._switches = [module for module in self.model.modules() if hasattr(module, "gradient_checkpointing")]
        if not any(module.gradient_checkpointing for module in self._switches):
            return False, False
        if self._own_bytes is None:
            self._own_bytes = sum(p.nbytes for p in self.model.parameters())
        small = self.accumulator.fit(layout.units, int(_INSTANCES * self._own_bytes))
        instances = not self.weights.anyone(not small)
        return not instances, instances

    def _refuse_foreign_gradients(self, when: str) -> None:
        """Every covered use returns no gradient to autograd, so a `.grad` that appears is one nothing has clipped."""
        for name, parameter in (*self.parameters.items(), *self.read.items()):
            if parameter.grad is not None:
                parameter.grad = None
                if self._preparing:
                    raise UnsupportedUse(
                        f"{name} is read where no module's forward runs, as in a checkpointed function"
                    )
                raise RuntimeError(
                    f"{name} holds a gradient {when} that was not clipped: call optimizer.zero_grad() after step(), and "
                    "let no loss term use parameters directly"
                )

    def _prepare(self, call: Call, ticket: Ticket) -> None:
        """Trace the model, see that its rows are independent, and try the route of uses on a few examples."""
        self._preparing = True
        self.guard.settle()
        try:
            with unchanged(self.model):
                reason = self._decide(call, ticket)
        finally:
            self._preparing = False
            self.accumulator.reset()
        self.guard.require_settled()
        if reason is not None:
            self._fall_back(reason, ticket)
        self._structure.changed()
        self.on_route(str(self.route), reason)

    def _decide(self, call: Call, ticket: Ticket) -> str | None:
        """The reason why the one-example route is taken, or None; raises for a model that neither route serves."""
        self.trace = self._tracer.trace(self._root.original, call, ticket.rows)
        modules = dict(self.model.named_modules())
        for name, weight in self.trace.heads.items():
            if name:
                self.reads.heads.weights[id(weight)] = weight
                self._patches[name] = PatchedForward(modules[name], self.reads)
        rows = selfcheck.chosen_rows(ticket)
        selfcheck.buffers(self, call, ticket)
        reason = self.trace.conflict
        if self.check:
            try:
                selfcheck.collation(self, call, ticket)
                rows = selfcheck.independence(self, call, ticket, rows)
            except UnsupportedUse as error:
                reason = reason or str(error)
        reason = reason or self._try_uses(call, ticket, rows)
        if reason is not None and ticket.token_units is None:
            try:
                selfcheck.alone(self, call, ticket, rows)
            except SelfCheckError:
                raise
            except Exception as error:
                raise ValueError(
                    f"no route serves this model: {reason}; and on one row alone it fails: {error}"
                ) from error
        return reason

    def _fall_back(self, reason: str, ticket: Ticket) -> None:
        """Go on by the one-example route: exact for any model, and slow."""
        if ticket.token_units is not None:
            raise ValueError(f"packed rows need a per-example rule for every parameter, and one is missing: {reason}")
        if self.weights.cut:
            raise ValueError(
                f"weights in pieces need a per-example rule for every parameter, and one is missing: {reason}; train the model "
                "without fully_shard, or freeze that parameter"
            )
        self._unpatch()
        self.route, self.reason = ONE_EXAMPLE, reason
        warnings.warn(f"this model takes the one-example route, exact but several times slower: {reason}", stacklevel=3)

    def _try_uses(self, call: Call, ticket: Ticket, rows: Sequence[int]) -> str | None:
        assert self.trace is not None
        self.reads.carries_rows = self.trace.carries_rows
        self.expected, self.accumulator.tables = self.trace.uses, self.trace.tables
        modules = dict(self.model.named_modules())
        self.route = USES
        try:
            for name in self.trace.modules:
                if name and name not in self._patches:
                    self._patches[name] = PatchedForward(modules[name], self.reads)
            if "" in self.trace.modules:
                self._root.wrap(PatchedForward(self.model, self.reads))
            if self.check:
                selfcheck.compare(self, call, ticket, rows)
            else:
                with unchanged(self.model):
                    self.run_forward(*call, ticket, verify=True)
            return None
        except (SelfCheckError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self.model.zero_grad(set_to_none=True)
            self._unpatch()
            return str(error) or type(error).__name__

    def _unpatch(self) -> None:
        for patch in self._patches.values():
            patch.remove()
        self._patches.clear()
        self.reads.heads.weights.clear()
        self._root.unwrap()

    def _check_again(self, call: Call, ticket: Ticket, *, thorough: bool) -> None:
        """What the first batch was asked, of some rows of a later one; without ``thorough``, one extra pass or two rows."""
        self._preparing, kept = True, self.accumulator
        start = random.SystemRandom().randrange(ticket.rows)
        rows = selfcheck.chosen_rows(ticket, start)
        try:
            with unchanged(self.model):
                if thorough:
                    selfcheck.collation(self, call, ticket)
                    if self.route == USES:
                        rows = selfcheck.independence(self, call, ticket, rows)
                    if self.route == USES:
                        selfcheck.compare(self, call, ticket, rows)
                else:
                    self._foreseen = selfcheck.briefly(self, call, ticket, rows)
        except UnsupportedUse as error:
            self._fall_back(str(error), ticket)
        finally:
            self._preparing, self.accumulator = False, kept

    def _one_at_a_time(self, call: Call, ticket: Ticket, layout: Layout) -> Any:
        """The universal route: each row is a batch of its own, so any model is differentiated exactly."""
        outputs, targets, backward = rows_alone(self, call, ticket, layout)
        waiting = Pass(ticket, layout, backward, Tap(layout), True, call)
        output = merged(outputs)
        if self.returns_loss:
            rows = torch.stack([loss.detach().reshape(()).float() for (loss,) in targets])
            return replace_loss(output, self._loss(masked_mean(layout.sum_lanes(rows), layout.weights), waiting))
        flat = [torch.cat([row[i] for row in targets]) for i in range(len(targets[0]))]
        anchor = torch.zeros((), device=flat[0].device, requires_grad=True)
        outer = OutputBoundary.apply(anchor, lambda upstream: self._backward(waiting, upstream), flat)
        queue = deque(outer)
        return map_tensors(output, lambda t: queue.popleft() if t.requires_grad and t.dim() > 0 else t)


def _real(ticket: Ticket) -> Ticket:
    """The ticket, to be checked: a padding row that stands for an empty sample is looked at as if it were a unit's."""
    return (
        ticket if bool(ticket.weights.any()) else dataclasses.replace(ticket, weights=torch.ones_like(ticket.weights))
    )


def _outer(output: Any) -> list[torch.Tensor]:
    """What a criterion outside the model may be computed from. Raises ValueError if there is nothing."""
    found = [t for t in tensors(output) if t.requires_grad and t.dim() > 0]
    if not found:
        raise ValueError("the model returned no tensor that a loss could be computed from")
    return found
