"""One pass of a model, forward and backward, by the route that its per-example gradients take, into an accumulator."""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from fastdp.calls.autograd import graph_of
from fastdp.calls.batches import Call, as_long_as, leaves, map_tensors, single_rows, slice_rows, tensors
from fastdp.calls.outputs import differentiable, differentiable_outputs
from fastdp.calls.pending import WeightPenalty
from fastdp.calls.randomness import (
    BufferSnapshot,
    devices,
    preserve_rng,
    repeatable,
    seed_from_os,
    seed_own_generators,
    seeds_for,
    unchanged,
)
from fastdp.distributed.pieces import to_local
from fastdp.distributed.ranks import ONE, Ranks
from fastdp.distributed.shards import weights_of
from fastdp.engine.capture.forwards import Forwards
from fastdp.engine.capture.memory import allowed_bytes, kept_bytes, longest
from fastdp.engine.capture.trace import Trace
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.policy import Policy, Unclipped
from fastdp.engine.errors import UnseenUse, UnsupportedUse
from fastdp.engine.loss.boundary import (
    Junction,
    OutputBoundary,
    OutputSeeds,
    find_loss,
    gradient_hooks_disabled,
    plain_gradients,
    replace_loss,
    require_loss,
    take_gradients,
)
from fastdp.engine.loss.losses import LossTerms, combine, intercepted, masked_mean
from fastdp.engine.loss.one_example import backward_starts, merged, run_alone
from fastdp.engine.uses.layout import Layout, Ticket
from fastdp.engine.uses.logits import VOCABULARY, Logits
from fastdp.engine.uses.reads import Reads
from fastdp.engine.uses.use import CaptureContext, differentiate

#: How per-example gradients are obtained.
USES, ONE_EXAMPLE, ORDINARY = "uses", "one-example", "ordinary"
#: The node of a reentrant checkpoint in autograd's graph.
_REENTRANT = "CheckpointFunctionBackward"
_GRADIENT = operator.attrgetter("grad")


@dataclass
class Pass:
    """One forward pass that waits for its backward: what to differentiate, and for whom.

    Args:
        junction: where this pass arrives with the gradient that the user's backward pass brings, or those of the outputs.
        targets: by the one-example route, what each row's backward pass starts from.
    """

    call: Call
    ticket: Ticket
    layout: Layout
    context: CaptureContext
    verify: bool
    junction: Junction
    tops: list[torch.Tensor]
    backward: Callable[[Any, bool], None] = lambda upstream, retain: None
    targets: Any = None
    #: Puts the model's buffers back after the backward pass.
    restore: Callable[[], None] = lambda: None
    #: Whether the backward pass runs twice, and keeps no factors.
    two_pass: bool = False
    used: bool = False
    #: What adds a recorded pass, or one in parts, to its logical batch, in the place of a backward pass with these gradients.
    replay: Callable[[Any], None] | None = None

    def replace_loss(self, output: Any, value: torch.Tensor, beside: Mapping[int, torch.Tensor]) -> Any:
        """What the model returned around another loss and other tensors, by identity, whose backward pass is this one's."""
        loss, *others = self.outputs([value.clone(), *beside.values()])
        return replace_loss(output, loss, dict(zip(beside, others)))

    def outputs(self, found: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Outputs whose backward pass is this one's."""
        junction = self.junction
        return OutputBoundary.apply(junction.anchor(found[0]), lambda g: junction.arrived.append((self, g)), found)

    def replace_outputs(self, output: Any) -> Any:
        """What the model returned, its differentiable tensors replaced by outputs of this pass.

        Raises ValueError if there is none.
        """
        found = differentiable_outputs(output)
        replaced = {id(t): o for t, o in zip(found, self.outputs(found))}
        return map_tensors(output, lambda t: replaced.get(id(t), t))


#: Passes that a loss has reached, each with the gradients that it brought: of the model's loss, if it has one, and of outputs.
#: None where the loss is the model's own: what the loop scales it by does not move the clipping threshold.
JoinedPasses = list[tuple[Pass, Any]]


def has_terms(parts: JoinedPasses) -> bool:
    """Whether a loop's loss has terms beside the model's own, or gives those of several passes different weights."""
    weights, beside = zip(*((weight, others) for _, (weight, *others) in parts))
    return any(g is not None for others in beside for g in others) or any(own != weights[0] for own in weights[1:])


class Passes:
    """A model's passes: per-example gradients of its trained parameters, clipped and summed as a policy says.

    Args:
        model: the user's model; only the `forward` attribute of some of its modules is patched, and only until `close`.
        policy: the method's decisions.
        train: what the model's own call does while it trains.
        loss_reduction: "mean" or "sum" over the rows, for a criterion outside the model; None for a model that returns
            its loss; "auto" for one that may, and otherwise has a criterion outside that takes a mean.
        two_pass: run the backward pass twice and keep no factors; None does so where checkpointing is on and the factors of
            one pass do not fit into memory (`fastdp.engine.capture.memory`).
        accumulator: takes the captures instead of an `Accumulator`, for other sums of per-example gradients than clipped ones.
        keep_logits: compute the logits of a vocabulary as a whole, so that they may be read beside the loss; False never does,
            None where that is faster.
        ranks: the processes that train together.
        secret: let nobody know what a training pass draws by chance (`fastdp.calls.randomness`).
        isolated: run each micro-batch, which holds one unit, as it is.

    Attributes:
        route, reason: how gradients are obtained, None before that is known; and why not by uses.
        trace: what is known of the model, by which uses are told apart.
        divided: the model's loss functions whose coefficient it divides by the number of rows.
        trying: whether a pass only looks at the model, so that none of its faults is the user's loop's.
        extend_trace: extends the trace by where a call of so many rows goes; raises `UnsupportedUse` where it cannot.
    """

    extend_trace: Callable[[Call, int], None]
    #: Whether the batch at hand went through the model more than once.
    twice: Callable[[], bool]
    #: Whether a backward pass may have given parameters gradients beside its captures.
    may_stray: Callable[[], bool]
    #: Whether probe batches that are planned now come before a release.
    probes_come: Callable[[], bool]
    #: The fewest rows of a matrix that counts as a vocabulary's head.
    vocabulary: int | None = VOCABULARY

    def __init__(
        self,
        model: torch.nn.Module,
        policy: Policy,
        train: Callable[[Any, Any], Any],
        *,
        loss_reduction: str | None = None,
        two_pass: bool | None = None,
        accumulator: Accumulator | None = None,
        keep_logits: bool | None = None,
        ranks: Ranks = ONE,
        secret: bool = False,
        isolated: bool = False,
    ):
        self.model, self.ranks = model, ranks
        self.chance = partial(seed_from_os, devices(model)) if secret else nullcontext
        if secret:
            seed_own_generators(model)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights = weights_of(model, ranks)
        #: The same as modules read them in a pass.
        self.read = self.weights.read(self.parameters)
        #: Both with their names, each parameter once.
        self._every = list({id(p): (n, p) for n, p in [*self.parameters.items(), *self.read.items()]}.values())
        self._parameters = [parameter for _, parameter in self._every]
        self.accumulator = accumulator or Accumulator(self.read, policy)
        self.accumulator.read(self.read, self.weights)
        self.device = next(iter(self.read.values())).device
        self.loss_reduction = loss_reduction
        #: Whether the model's output holds the loss to differentiate.
        self.returns_loss = loss_reduction in (None, "auto")
        self.two_pass = two_pass
        if keep_logits or not self.returns_loss or self.weights.cut:
            self.vocabulary = None
        self.route: str | None = ORDINARY if isinstance(policy, Unclipped) else None
        self.reason: str | None = None
        self.trace: Trace | None = None
        self.divided: frozenset[int] = frozenset()
        self.trying = False
        self.penalty = WeightPenalty()
        self.isolated = isolated and self.route is None
        #: Whether the model's own sums over rows count as losses, as torch's loss functions do.
        self.reductions = False
        #: Whether the loop's loss was seen to have terms beside the model's own.
        self.mixes = False
        #: Saved buffers that forwards write from parameters alone: verification restores them after each pass.
        self.derived_buffers: frozenset[str] = frozenset()
        #: Whether the one-example route collates each example by itself, and whether a collator joins examples, so that it must.
        self.recollates = self.joined = False
        #: Whether a pass went through reentrant checkpoints, whose backward pass may not be asked for single gradients.
        self.reentrant = False
        self.reads = Reads(self.read)
        self.reads.heads.always = keep_logits is False
        #: Runs compiled blocks without the compiler, which would trace the engine's captures.
        compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())
        self._uncompiled = partial(torch.compiler.set_stance, "force_eager") if compiled else nullcontext
        self.forwards = Forwards(model, self.reads, partial(self._train, train), lambda: self.trains, self.weights)
        #: Uses of each parameter in a forward pass, as traced.
        self._expected: Counter[str] = Counter()
        #: How many backward passes a micro-batch took, at most; 0 before the first.
        self.backward_passes = 0
        #: Bytes that factors of one pass take, by rows, units and length.
        self._kept: dict[tuple[int, int, float], int] = {}

    def settle_loss(self, outside: bool) -> None:
        """Fix who computes the loss: the loop (``outside``), as a mean over rows, or the model, which returns it."""
        self.loss_reduction, self.returns_loss = "mean" if outside else None, not outside

    @property
    def trains(self) -> bool:
        """Whether a call of the model is a training pass."""
        return self.model.training and torch.is_grad_enabled()

    @property
    def checkpointed(self) -> bool:
        """Whether some of the model's activations are computed again in the backward pass."""
        return True in [module.gradient_checkpointing for module in self._switches]

    @cached_property
    def _switches(self) -> list[Any]:
        return [module for module in self.model.modules() if hasattr(module, "gradient_checkpointing")]

    def scale(self, ticket: Ticket) -> float:
        """What the loop divided the gradients of outputs by."""
        return 1.0 if self.loss_reduction == "sum" else float(ticket.rows)

    def beside_loss(
        self, output: Any, rows: int, terms: LossTerms | None = None, *, losses: bool = True
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors beside the model's loss of which a loop may make terms: outputs, with rows first, and other ``losses``.

        Each comes with the tensor to differentiate: itself or, of a loss with ``terms``, the losses of its units.
        """
        in_front = None if self.trace is None else self.trace.outputs.in_front
        own, found = find_loss(output) if losses else None, {}
        for path, t in leaves(output):
            if t in found or not t.requires_grad or type(t) in (Logits, torch.nn.Parameter):
                continue
            if t.dim() and t.shape[0] == rows and (in_front is None or in_front.get(path) == t.dim()):
                found[t] = t
            elif losses and not t.dim() and t is not own:
                # A temperature, say, is no row's.
                with suppress(UnsupportedUse):
                    found[t] = t if terms is None else combine(t, terms, self.divided, verify=False)
        return [*found.items()]

    def check_starts(
        self, output: Any, rows: int, losses: torch.Tensor | None, terms: LossTerms | None = None, scale: float = 1.0
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What a check's backward pass starts from, and with what: ones for losses, fixed numbers over ``scale`` for outputs."""
        beside = self.beside_loss(output, rows, terms) if self.mixes else []
        tops = differentiable(output) if losses is None else [t for t, _ in beside if t.dim()]
        ones = [] if losses is None else [losses, *(top for t, top in beside if not t.dim())]
        return ones + tops, [*map(torch.ones_like, ones), *(seed / scale for seed in seeds_for(tops))]

    def close(self) -> None:
        """Give the model its own forwards back."""
        self.forwards.close()
        self.weights.release()

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Passes that release nothing: buffers, random states and the accumulator are restored afterwards."""
        kept, self.trying = self.accumulator, True
        try:
            # Probes send NaN to rows that must not be reached, which is no anomaly.
            with unchanged(self.model), torch.autograd.set_detect_anomaly(False):
                yield
        finally:
            self.accumulator, self.trying = kept, False

    def plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward pass, with nothing intercepted but the logits of heads, left out."""
        with self.reads.heads.open():
            output = self.forwards.root.plain(*args, **kwargs)
        if self.loss_reduction == "auto":
            self.settle_loss(all([t.dim() for t in tensors(output)] or [0]))
        if self.returns_loss or self.trace is None:
            return output
        return self.trace.outputs.first(output, self.trace.rows_of((args, kwargs)))

    def _train(self, train: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
        """A training call of the model, whose outputs have rows where the model puts them."""
        with self._uncompiled():
            output = train(args, kwargs)
        return output if self.returns_loss or self.trace is None else self.trace.outputs.as_returned(output)

    def take_uses(self) -> None:
        """Go on by the route of uses, as the trace knows them."""
        assert self.trace is not None
        selecting = frozenset(module for _, module in self.trace.selections) - {""}
        self.reads.learn(self.trace.carries_rows, selecting)
        self._expected, self.accumulator.tables = self.trace.uses, self.trace.tables
        self.route = USES
        unread = self.parameters.keys() - {read.parameter for read in self.trace.reads}
        # A later batch may read these, as where tasks have heads of their own.
        modules = [*(read.module for read in self.trace.reads), *selecting, *(n.rpartition(".")[0] for n in unread)]
        self.forwards.patch(dict.fromkeys(modules))

    def fall_back(self, reason: str, ticket: Ticket) -> None:
        """Go on by the one-example route: exact for any model, and slow. Raises ValueError where it does not serve."""
        if ticket.token_units is not None:
            raise ValueError(f"packed rows need a per-example rule for every parameter, and one is missing: {reason}")
        if self.weights.cut:
            raise ValueError(
                f"weights in pieces need a per-example rule for every parameter, and one is missing: {reason}; train the model "
                "without fully_shard, or freeze that parameter"
            )
        self.forwards.unpatch()
        self.route, self.reason = ONE_EXAMPLE, reason
        warnings.warn(f"this model takes the one-example route, exact but several times slower: {reason}", stacklevel=3)

    def layout_of(self, ticket: Ticket) -> Layout:
        """Where a batch's rows and units lie, with what the trace knows of its meetings."""
        layout = ticket.layout(self.device)
        layout.meetings = self.trace.meetings if self.trace is not None else {}
        return layout

    def terms(self, layout: Layout) -> LossTerms:
        """What takes the losses within a forward pass."""
        selections = set() if self.trace is None else self.trace.selections
        return LossTerms(layout, reductions=self.reductions, selections=selections)

    def run_forward(
        self,
        call: Call,
        ticket: Ticket,
        *,
        verify: bool,
        junction: Junction | None = None,
        layout: Layout | None = None,
    ) -> tuple[Any, Pass]:
        """Run the forward pass by the chosen route: its output, with a boundary for loss or outputs, and the pass behind it.

        ``junction`` says what a backward pass does (default: `differentiate`); ``verify`` also checks how the loss is made.
        """
        layout, junction = layout or self.layout_of(ticket), junction or Junction(self.differentiate)
        if self.isolated and (ticket.rows == 1 or not self.returns_loss):
            return self._in_isolation(call, ticket, layout, junction)
        if self.isolated or self.route == ONE_EXAMPLE:
            return self._one_at_a_time(call, ticket, layout, junction)
        two_pass = self._needs_two_passes(call, layout)
        parts = self._in_parts(call, ticket, layout, junction) if two_pass and not verify else None
        return parts or self._by_uses(call, ticket, layout, junction, verify=verify, two_pass=two_pass)

    def _by_uses(
        self, call: Call, ticket: Ticket, layout: Layout, junction: Junction, *, verify: bool, two_pass: bool
    ) -> tuple[Any, Pass]:
        """One forward pass on all rows, whose uses capture their factors in the backward pass; also ordinary training."""
        context = CaptureContext(layout)
        context.whole = self.reentrant
        if not (verify or self.weights.cut or two_pass):
            context.allow(self.accumulator.may_hold(layout))
        try:
            output, tops, terms = self._capture_forward(call, layout, context, verify=verify)
        finally:
            # Autograd's nodes hold the context: with the captures in it, they would be a cycle that is never collected.
            own, context.own, context.room = context.own, [], -1
        beside: list[tuple[torch.Tensor, torch.Tensor]] = []
        gradients: list[Any] = []
        if self.returns_loss and ticket.token_units is None:
            beside = self.beside_loss(output, ticket.rows, terms, losses=verify or self.mixes)
            tops += [OutputSeeds.apply(gradients, *[top for _, top in beside])] if beside else []
        # Noted here, as the backward pass shall not keep the outputs in memory.
        losses = [not t.dim() for t, _ in beside]
        ends = (tops[:1] if self.returns_loss else tops) if verify else []
        self.reentrant |= _REENTRANT in [type(node).__name__ for top in ends for node in graph_of(top)]

        def backward(upstream: Any, retain: bool) -> None:
            if self.returns_loss:
                # Padding units send back exact zeros, and their weight of 0 selects them out of every sum.
                weight, *others = upstream
                counted = (layout.weights > 0).to(tops[0].dtype)
                pairs = [] if weight is None else [(tops[0], counted * weight)]
                if others:
                    scales = [counted if loss else self.scale(ticket) for loss in losses]
                    gradients[:] = [None if g is None else g * by for g, by in zip(others, scales)]
                    pairs.append((tops[1], torch.ones_like(tops[1])))
            else:
                pairs = [(t, g * self.scale(ticket)) for t, g in zip(tops, upstream) if g is not None]
            starts, seeds = [t for t, _ in pairs], [g for _, g in pairs]
            with self.weights.gathered() if self.weights.cut else nullcontext():
                differentiate(starts, seeds, own, context, self._parameters, retain=retain)

        waiting = Pass(call, ticket, layout, context, verify, junction, tops, backward, two_pass=two_pass)
        if self.returns_loss:
            own_mean = next((term.mean for term in terms.terms if term.per_unit is tops[0]), None)
            mean = masked_mean(tops[0].detach(), layout.weights) if own_mean is None else own_mean
            return waiting.replace_loss(output, mean, {id(t): t for t, _ in beside} if beside else {}), waiting
        return waiting.replace_outputs(output), waiting

    def _capture_forward(
        self, call: Call, layout: Layout, context: CaptureContext, *, verify: bool
    ) -> tuple[Any, list[torch.Tensor], LossTerms]:
        """Run a forward pass with captures: the output, units' losses ``[units]`` or outputs to differentiate, and loss terms."""
        if not self.trying or self.weights.cut:
            return self._capture_as_traced(call, layout, context, verify=verify)
        # Some rows may take another branch than the whole batch, as without padding; the retry draws the same numbers.
        try:
            with preserve_rng(self.model):
                return self._capture_as_traced(call, layout, context, verify=verify)
        except UnseenUse:
            self.extend_trace(call, layout.rows)
        context.restart()
        return self._capture_as_traced(call, layout, context, verify=verify)

    def _capture_as_traced(
        self, call: Call, layout: Layout, context: CaptureContext, *, verify: bool
    ) -> tuple[Any, list[torch.Tensor], LossTerms]:
        terms = self.terms(layout)
        context.selected = terms.selected
        self.reads.context = context if self.route == USES else None
        try:
            with intercepted(terms):
                output = self.forwards.root.original(*call[0], **call[1])
        finally:
            self.reads.context = None
            if self.reads.heads.made:
                self.reads.heads.close()
        if not self.returns_loss:
            output = output if self.trace is None else self.trace.outputs.first(output, layout.rows)
            return output, differentiable_outputs(output), terms
        total = require_loss(output)
        try:
            losses = combine(total, terms, self.divided, verify=verify)
        except UnsupportedUse:
            if self.route != ORDINARY:
                raise
            # Nothing is clipped: the mean over the rows stands for each of them.
            losses = total.expand(layout.units)
        context.shapes |= {("a loss function", (count,)) for count in terms.tokens}
        return output, [losses], terms

    def _in_parts(self, call: Call, ticket: Ticket, layout: Layout, junction: Junction) -> tuple[Any, Pass] | None:
        """Run several passes of fewer units, each of which fits into memory; None where two backward passes must do."""
        fixed = self.two_pass is not None or self.trying or self.weights.cut or ticket.token_units is not None
        if fixed or self.mixes or not self.returns_loss or self.trace is None:
            return None
        most, longer = layout.units, longest(self.trace, call, layout.rows)
        while not self._fits(most * int(layout.counts.max()), most, longer):
            if most == 1:
                return None
            most = (most + 1) // 2
        bounds, found = [0, *layout.counts.cumsum(0).tolist()], list[tuple[Any, Pass]]()
        try:
            for first in range(0, layout.units, most):
                last = min(first + most, layout.units)
                rows = slice(bounds[first], bounds[last])
                own = replace(ticket, row_units=ticket.row_units[rows] - first, weights=ticket.weights[first:last])
                found.append(self.run_forward(slice_rows(call, rows, self.trace.carriers), own, verify=False))
        except UnsupportedUse:
            # Some rows may take another branch than the whole batch.
            return None
        outputs, parts = zip(*found)
        context, losses = CaptureContext(layout), torch.cat([part.tops[0].detach() for part in parts])
        context.shapes = set().union(*(part.context.shapes for part in parts))
        waiting = Pass(call, ticket, layout, context, False, junction, [losses])

        def differentiate(_: Any) -> None:
            for part in parts:
                self.differentiate([(part, None)])

        waiting.replay = differentiate
        return waiting.replace_loss(merged(list(outputs)), masked_mean(losses, layout.weights), {}), waiting

    def _one_at_a_time(self, call: Call, ticket: Ticket, layout: Layout, junction: Junction) -> tuple[Any, Pass]:
        """The universal route: each row is a batch of its own, so any model is differentiated exactly."""
        output, targets, loss, beside = self.plain_rows(call, ticket, layout, layout.weights)
        waiting = Pass(call, ticket, layout, CaptureContext(layout), True, junction, [], targets=targets)
        own = waiting.replace_outputs(output) if loss is None else waiting.replace_loss(output, loss, beside)
        return own, waiting

    def _in_isolation(self, call: Call, ticket: Ticket, layout: Layout, junction: Junction) -> tuple[Any, Pass]:
        """Run the batch of one unit as it is; its buffers are restored after the backward pass."""
        snapshot = BufferSnapshot(self.model)
        output = self.plain_forward(*call[0], **call[1])
        beside = {id(t): t for t, _ in self.beside_loss(output, ticket.rows)} if self.returns_loss else {}
        tops = [require_loss(output), *beside.values()] if self.returns_loss else differentiable_outputs(output)
        waiting = Pass(call, ticket, layout, CaptureContext(layout), True, junction, [], restore=snapshot.restore)
        waiting.targets = [tops, *[[]] * (ticket.rows - 1)]
        if not self.returns_loss:
            return waiting.replace_outputs(output), waiting
        return waiting.replace_loss(output, tops[0].detach(), beside), waiting

    def run_rows(self, call: Call, ticket: Ticket) -> tuple[list[Any], list[list[torch.Tensor]]]:
        """Each row's output and what its backward pass starts from, by the one-example route."""
        if self.recollates:
            singles = ticket.source.alone(call)
        else:
            carriers = as_long_as(call, ticket.rows) if self.trace is None else self.trace.carriers
            singles = single_rows(call, carriers, ticket.rows, self.returns_loss)
        outputs = run_alone(self.model, self.plain_forward, singles, ticket, self.device, self.derived_buffers)
        if not self.returns_loss:
            return outputs, [differentiable(output) for output in outputs]
        # Losses of shape [1] would be merged like any other tensor with rows.
        each = [(require_loss(output).reshape(()), self.beside_loss(output, 1)) for output in outputs]
        targets = [[loss, *(t for t, _ in beside)] for loss, beside in each]
        kept = ({id(t): t for t in beside} for _, *beside in targets)
        return [replace_loss(output, own[0], same) for output, own, same in zip(outputs, targets, kept)], targets

    def plain_rows(
        self, call: Call, ticket: Ticket, layout: Layout, weights: torch.Tensor
    ) -> tuple[Any, list[list[torch.Tensor]], torch.Tensor | None, dict[int, torch.Tensor]]:
        """Run rows without capturing: the output, what each row's backward pass starts from, the loss, and what is beside it.

        Losses are means over the units of ``weights``; those beside it come by the identity of the output's tensors.
        """
        rows, terms = range(ticket.rows), self.terms(layout)
        targets: list[list[torch.Tensor]] = []
        if self.route == ONE_EXAMPLE:
            outputs, targets = self.run_rows(call, ticket)
            output = merged(outputs)
        else:
            with intercepted(terms):
                output = self.plain_forward(*call[0], **call[1])
        if not self.returns_loss:
            found = differentiable(output)
            return output, targets or [[t[row : row + 1] for t in found] for row in rows], None, {}
        alone = bool(targets or terms.unmapped or not (terms.terms or terms.reduced))
        beside = self.beside_loss(output, ticket.rows, None if alone else terms)
        if alone:
            targets = targets or self.run_rows(call, ticket)[1]
            # What rows have of different shapes is no output of all.
            beside = beside if {len(own) for own in targets} == {1 + len(beside)} else []
        else:
            losses = combine(require_loss(output), terms, self.divided, verify=False)
            own = ([top[row : row + 1] if t.dim() else top[row] for t, top in beside] for row in rows)
            targets = [[loss, *tops] for loss, tops in zip(losses, own)]

        def mean(at: int) -> torch.Tensor:
            each = torch.stack([own[at].detach().float() for own in targets])
            return masked_mean(layout.sum_lanes(each), weights)

        values = {id(t): t if t.dim() else mean(at) for at, (t, _) in enumerate(beside, 1)}
        return output, targets, mean(0), values

    def differentiate(self, parts: JoinedPasses) -> None:
        """Run the backward passes of one micro-batch's forward passes into the accumulator, as if they were one pass."""
        if parts[0][0].replay is not None:
            parts[0][0].replay(parts[0][1])
            return
        with self._uncompiled(), nullcontext() if self.route == ORDINARY else gradient_hooks_disabled(self._parameters):
            self._differentiate(parts)

    def _differentiate(self, parts: JoinedPasses) -> None:
        layout, every = parts[0][0].layout, [own for own, _ in parts]
        two_pass = all(own.two_pass for own in every)

        def backward(retain: bool) -> None:
            for own, upstream in parts:
                self.reads.context = own.context if self.route == USES else None
                own.backward(upstream or (1 / len(parts),), retain)

        def open_sink(sink: Any) -> None:
            for own in every:
                own.context.sink = sink

        try:
            if self.route == ORDINARY:
                names = list(self.read)
                with take_gradients(self.read.values(), lambda i, g: self.accumulator.add_gradient(names[i], g)):
                    backward(False)
                self.accumulator.finish()
                self.accumulator.units = self.accumulator.units + (layout.weights > 0).sum()
            elif self.route == ONE_EXAMPLE:
                self._differentiate_rows(parts)
            else:
                several = len(parts) > 1
                uses = {n: count * len(parts) for n, count in self._expected.items()} if several else self._expected
                with repeatable(self.model) if two_pass else nullcontext():
                    self.accumulator.run(backward, open_sink, layout, uses, two_pass=two_pass)
                self.backward_passes = max(self.backward_passes, 1 + two_pass)
                if self.may_stray():
                    self.refuse_foreign_gradients("in the backward pass")
        except UnsupportedUse as error:
            # Nothing has been added yet: captures are refused before the first norm is used.
            if self.trying or parts[0][1] is not None:
                raise
            self.fall_back(str(error), parts[0][0].ticket)
            with torch.enable_grad(), self.chance():
                for own in every:
                    own.targets = self.run_rows(own.call, own.ticket)[1]
            self._differentiate_rows(parts)
        finally:
            self.reads.context = None
            for own in every:
                own.context.close()
                # What only other outputs follow from is freed with them.
                own.tops.clear()

    def _differentiate_rows(self, parts: JoinedPasses) -> None:
        """Each unit's rows in a backward pass of their own, from all passes at once."""
        ticket, weights = parts[0][0].ticket, parts[0][0].layout.weights
        scale = self.scale(ticket)
        for unit in (weights != 0).nonzero()[:, 0].tolist():
            rows = (ticket.row_units == unit).nonzero()[:, 0].tolist()
            gradients = plain_gradients(*backward_starts(rows, parts, scale, self.returns_loss), self.read.values())
            found = {n: g.float().unsqueeze(0) for n, g in zip(self.read, gradients) if g is not None}
            self.accumulator.add_unit(found, weights[unit : unit + 1])
        for own, _ in reversed(parts):
            own.restore()

    @cached_property
    def _allowed(self) -> int:
        return allowed_bytes(self.parameters, self.device)

    def _needs_two_passes(self, call: Call, layout: Layout) -> bool:
        """Whether to run the backward pass twice: if checkpointing is on, and one pass's factors do not fit into memory."""
        if self.two_pass is not None:
            return self.two_pass
        if self.route != USES or not self.checkpointed:
            return False
        assert self.trace is not None
        return self.weights.agreed(not self._fits(layout.rows, layout.units, longest(self.trace, call, layout.rows)))

    def _fits(self, rows: int, units: int, longer: float) -> bool:
        """Whether one backward pass over so many rows keeps no more than memory allows."""
        assert self.trace is not None
        shape = rows, units, longer
        if shape not in self._kept:
            self._kept[shape] = kept_bytes(self.trace, self.read, *shape, self.device)
        return self._kept[shape] <= self._allowed

    def drop_zero_gradients(self) -> bool:
        """Free the gradients that ``zero_grad(set_to_none=False)`` set to zero; whether others may stay, to be refused."""
        if {None}.issuperset(map(_GRADIENT, self._parameters)):
            return self.weights.cut
        held = [parameter for parameter in self._parameters if parameter.grad is not None]
        # One host synchronization, whatever their number.
        some = torch.stack([to_local(p.grad).any().to(self.device) for p in held if p.grad is not None])
        if not bool(some.any()):
            for parameter in held:
                parameter.grad = None
        return True

    def refuse_foreign_gradients(self, when: str) -> None:
        """Every covered use returns no gradient to autograd, so a `.grad` that appears is one nothing has clipped."""
        stray = self.weights.stray() if self.weights.cut else None
        if stray is None and {None}.issuperset(map(_GRADIENT, self._parameters)):
            return
        for name, parameter in self._every:
            if parameter.grad is not None or name == stray:
                parameter.grad = None
                if self.trying:
                    outside = "is read where no module's forward runs, as in a checkpointed function"
                    raise UnsupportedUse(f"{name} {outside}")
                raise RuntimeError(
                    f"{name} holds an unclipped gradient {when}. Call zero_grad() after step(), use modules in forward(), and "
                    "begin a penalty of weights with the first batch."
                )
