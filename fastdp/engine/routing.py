"""Which route a model's gradients take: decided at the first batch by one trace, with which later batches are compared.

A batch is *checked* before its pass if it is the first, of a new kind, or due by schedule. Its pass is then compared with the
trace. Where a pass differs, that batch *extends* the trace and is checked as the first one was.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from fastdp.calls.batches import Call, Inputs, Path, RowNumbers, as_long_as, leaves, options, wrong_rows
from fastdp.calls.errors import SelfCheckError
from fastdp.calls.modes import autocast_now, refuse_mixing
from fastdp.calls.outputs import NO_ROWS
from fastdp.calls.randomness import unchanged
from fastdp.distributed.ranks import RankLost
from fastdp.engine.capture.trace import Trace, Tracer
from fastdp.engine.errors import InnerBackward, OwnLoss, UnseenUse, UnsupportedUse, Untraceable
from fastdp.engine.loss.boundary import LACKS_LOSS, Junction
from fastdp.engine.passes import ORDINARY, USES, Pass, Passes
from fastdp.engine.uses.layout import Ticket
from fastdp.engine.uses.use import CaptureContext
from fastdp.validate import first_line

#: Different sets of uses that batches may have: each costs the checks of a first batch.
_MOST_WAYS = 16
#: Kinds of calls that are remembered, at most: the oldest are compared with the trace anew.
MOST_CALLS = 1 << 12
#: Values of a text argument that count as choices among branches of the model; with more, it is taken for free text.
_MOST_TEXTS = 32


class Routing:
    """Choose the route of the first batch, and compare later batches with its trace.

    This class verifies nothing: `fastdp.verify.Checks` fills in the hooks ``verify_*``, which do nothing here.

    Args:
        passes: of the model.

    Attributes:
        enabled: whether batches are verified.
        waiting_probes: batches for the training loop alone that have not gone through it yet; nothing is released before.
        traced: the calls that were compared with the trace, once there is one.
        deferred_checks: of microbatches of this logical batch, where weights are in pieces: they run where ranks synchronize.
    """

    enabled = False
    waiting_probes = 0
    traced: TraceCache

    def __init__(self, passes: Passes):
        self.passes = passes
        self._tracer = Tracer(passes.model, passes.read, passes.vocabulary)
        #: The kind of the call at hand: its rows, choices and shapes.
        self._kind: Any = None
        passes.extend_trace = self._extend_trace
        self.deferred_checks: list[Callable[[], None]] = []
        #: The deferred check of the microbatch at hand, if it has one.
        self._deferred: Callable[[CaptureContext], None] | None = None

    def before(self, call: Call, ticket: Ticket, inputs: Inputs) -> bool:
        """Check a batch, whose tensors are ``inputs``, before its pass. True if this process ran the model for that."""
        passes = self.passes
        if passes.route == ORDINARY or passes.isolated:
            return False
        first, self._deferred = passes.route is None, None
        free = () if first else self.traced.free_texts
        self._kind = ticket.rows, options(call, free), tuple([(path, t.shape) for path, t in inputs])
        checked = self._open(call, ticket) if first else self._check(call, ticket)
        self.verify_loop(call, ticket)
        return checked

    def _check(self, call: Call, ticket: Ticket) -> bool:
        """Check a later batch now, if it is new or due, or where ranks synchronize. True if it was checked now."""
        passes, due = self.passes, self.due(call, ticket)
        new = not (passes.recollates or self._kind in self.traced.compared) and self.traced.is_new(call, ticket.rows)
        if passes.weights.cut and (new or due):
            # Other ranks would not follow in the middle of a logical batch.
            self._deferred = partial(self._check_later, call, ticket, due, autocast_now(passes.device))
            return False
        if new:
            self.traced.find_carriers(call, ticket.rows)
        if due:
            self.verify_later(call, _weighted(ticket), due)
        return new or bool(due)

    def _check_later(
        self, call: Call, ticket: Ticket, due: str, precision: AbstractContextManager[Any], context: CaptureContext
    ) -> None:
        with precision:
            self.traced.find_carriers(call, ticket.rows)
            if due:
                self.verify_later(call, _weighted(ticket), due)
            try:
                self.traced.compare(call, ticket.rows, context, checked=False)
            except UnsupportedUse as error:
                self.passes.fall_back(str(error), ticket)

    def run_deferred_checks(self) -> None:
        """Check the microbatches of this logical batch that could not be checked before their passes."""
        checks, self.deferred_checks = self.deferred_checks, []
        for check in checks:
            check()

    def after(self, waiting: Pass, *, extended: bool) -> None:
        """Compare the uses of a batch's own pass with the trace. Raises `UnseenUse` if the trace must be `extend`ed first.

        ``extended`` says that it was, by this batch.
        """
        if self._deferred is not None:
            self.deferred_checks.append(partial(self._deferred, waiting.context))
            return
        traced, context = self.traced, waiting.context
        new = traced.compared.get(self._kind) != context.shapes
        if new and traced.compare(waiting.call, waiting.ticket.rows, context, checked=extended):
            _remember(traced.compared, self._kind, frozenset(context.shapes))
        self.verify_pass(waiting)

    def extend(self, call: Call, ticket: Ticket) -> None:
        """Extend the trace by a batch that reads parameters in another way than those before, and check it as the first.

        Raises `UnsupportedUse` where no trace serves it, or its rows must be run alone.
        """
        passes, ticket = self.passes, _weighted(ticket)
        divided = passes.divided
        if passes.trace is None or not self.enabled:
            raise UnsupportedUse("a batch reads parameters in another way than the first one did")
        # A loop that goes on after a refusal finds the trace as it was.
        with passes.trial(), passes.trace.trying():
            try:
                self._extend_trace(call, ticket.rows)
                self.verify_rows(call, ticket)
                if passes.divided != divided:
                    raise UnsupportedUse("a later batch divides its loss by its rows and the first one did not")
                self.verify_engine(call, ticket)
            except SelfCheckError as error:
                # Rows that are run alone do not meet.
                raise UnsupportedUse(str(error)) from error
            finally:
                passes.divided = divided

    def _extend_trace(self, call: Call, rows: int) -> None:
        self.traced.extend(call, rows)
        if self.passes.route == USES:
            self.passes.take_uses()

    def watching(self) -> AbstractContextManager[None]:
        """Watch the model's state during a training forward pass."""
        return nullcontext()

    def due(self, call: Call, ticket: Ticket) -> str:
        """What a batch after the first is to be verified for; "" for nothing."""
        return ""

    def verify_rows(self, call: Call, ticket: Ticket) -> None:
        """Verify that rows are independent. Raises `UnsupportedUse` if they must be run alone, `SelfCheckError` to refuse."""

    def verify_engine(self, call: Call, ticket: Ticket) -> None:
        """Verify the engine's norms and sums; here, run one forward pass by the route of uses."""
        self.passes.run_forward(call, ticket, verify=True)

    def verify_alone(self, call: Call, ticket: Ticket) -> None:
        """Verify the one-example route."""

    def verify_later(self, call: Call, ticket: Ticket, due: str) -> None:
        """Verify a batch after the first, as `due` has it."""

    def verify_loop(self, call: Call, ticket: Ticket) -> None:
        """Verify what the training loop makes of a batch."""

    def verify_terms(self, call: Call, ticket: Ticket) -> None:
        """Verify the terms that a loop's loss has beside the model's, the first time that it has any."""

    def verify_pass(self, waiting: Pass) -> None:
        """Verify what a batch's own forward pass gave."""

    def run_probe(self, call: Call, ticket: Ticket, junction: Junction) -> Any:
        """Run a batch that only verifies the training loop; a router that verifies nothing plans none."""
        raise NotImplementedError("only fastdp.verify.Checks hands out such batches")

    def abandon(self) -> None:
        """Forget probes of a logical batch that was discarded."""

    @contextmanager
    def tracing(self, call: Call, ticket: Ticket) -> Iterator[None]:
        """Watch the model's state while it is traced."""
        yield

    def _open(self, call: Call, ticket: Ticket) -> bool:
        """Trace the model, verify its rows, and try the route of uses on a few of them."""
        passes, ticket = self.passes, _weighted(ticket)
        with passes.weights.apart():
            refuse_mixing(passes.model)
            with passes.trial():
                reason = self._decide(call, ticket)
            if reason is not None:
                passes.fall_back(reason, ticket)
        return True

    def _decide(self, call: Call, ticket: Ticket) -> str | None:
        """Why the one-example route is taken, or None. Raises ValueError for a model that no route serves."""
        passes = self.passes
        with self.tracing(call, ticket):
            passes.trace = self._trace(call, ticket)
        if passes.loss_reduction == "auto":
            passes.settle_loss(passes.trace.outputs.all_have_rows)
        self.traced = TraceCache(self._tracer, passes.trace, passes.forwards.root.plain)
        passes.forwards.leave_out(passes.trace.heads)
        reason = passes.trace.conflict
        try:
            # Otherwise losses cannot be told apart by row, and nothing can be compared.
            if passes.trace.mapped:
                self._settle_reductions(call, ticket)
        except UnsupportedUse as error:
            reason = reason or str(error)
        reason = reason or self._try_uses(call, ticket)
        if reason is not None and ticket.token_units is None:
            try:
                self.verify_alone(call, ticket)
            except SelfCheckError:
                raise
            except Exception as error:
                raise ValueError(f"no route serves this model: {reason}; one row alone fails with: {error}") from error
        return reason

    def _trace(self, call: Call, ticket: Ticket) -> Trace:
        """The model's trace; an empty one with a conflict where the model runs on this batch and fails on some of its rows.

        Such a batch may hold one tensor of all images' patches, say, so that examples are collated alone.
        """
        passes, carriers = self.passes, as_long_as(call, ticket.rows)
        try:
            if passes.joined:
                raise UnsupportedUse("the collator joins examples in one tensor")
            return self._tracer.trace(passes.forwards.root.original, call, ticket.rows)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Other ranks would not follow where weights are in pieces.
            if isinstance(error, Untraceable) or passes.weights.cut:
                raise
            reason = str(error)
            if not isinstance(error, InnerBackward):
                try:
                    with torch.no_grad():
                        output = passes.plain_forward(*call[0], **call[1])
                except Exception as own:
                    raise own if passes.joined else error from None
                if passes.joined and not (passes.returns_loss or as_long_as(output, ticket.rows)):
                    raise ValueError(NO_ROWS) from None
                reason = reason if passes.joined else f"the model fails on some rows of a batch: {first_line(error)}"
                passes.recollates = ticket.source is not None and ticket.source.sources(call) is not None
            return Trace([], carriers, carriers, {}, {}, [], mapped=False, conflict=reason)

    def _settle_reductions(self, call: Call, ticket: Ticket) -> None:
        """Decide, by `verify_rows`, whether the model's own means and sums over rows count as losses, as torch's do.

        They count if torch's loss functions do not explain the loss; where outputs may be losses, they are tried first.
        """
        passes = self.passes
        reductions_first = passes.trace is not None and passes.trace.outputs.may_be_losses
        if reductions_first and self._verify_reductions(call, ticket):
            return
        passes.reductions = False
        try:
            self.verify_rows(call, ticket)
        except OwnLoss:
            if reductions_first or not self._verify_reductions(call, ticket):
                raise

    def _verify_reductions(self, call: Call, ticket: Ticket) -> bool:
        """Whether `verify_rows` holds with the model's own means and sums over rows as losses, which then count as such."""
        self.passes.reductions = True
        try:
            self.verify_rows(call, ticket)
        except (UnsupportedUse, SelfCheckError):
            self.passes.reductions = False
        return self.passes.reductions

    def _try_uses(self, call: Call, ticket: Ticket) -> str | None:
        passes = self.passes
        try:
            passes.take_uses()
            self.verify_engine(call, ticket)
            return None
        except (SelfCheckError, RankLost, torch.OutOfMemoryError):
            raise
        except Exception as error:
            passes.model.zero_grad(set_to_none=True)
            passes.forwards.unpatch()
            if isinstance(error, UnsupportedUse | ValueError) and str(error) != LACKS_LOSS:
                return str(error)
            said = "" if str(error) == LACKS_LOSS else f" ({first_line(error)})"
            return f"a function of the model's own takes no parameters by row{said}"


def _weighted(ticket: Ticket) -> Ticket:
    """The ticket with every unit's weight 1, so that the padding row of an empty sample is verified like any other."""
    ones = torch.ones_like(ticket.weights)
    return ticket if bool(ticket.weights.any()) else dataclasses.replace(ticket, weights=ones)


class TraceCache:
    """The calls that were compared with the trace of the first one, which takes in what they add.

    Args:
        tracer: of the model.
        trace: of the first call.
        plain: the model's own forward pass.

    Attributes:
        compared: kinds of uses of a pass that was compared, by the kind of its call (rows, choices and shapes): asked first.
        free_texts: places of text arguments that have had so many values that these are no choices.
    """

    def __init__(self, tracer: Tracer, trace: Trace, plain: Callable[..., Any]):
        self._tracer, self._trace, self._plain = tracer, trace, plain
        self.compared: dict[Any, frozenset[Any]] = {}
        self.free_texts: set[Path] = set()
        self._texts: set[tuple[Path, str]] = set()
        #: Kinds of uses by the choices of a call and the shapes of its inputs, without rows.
        self._uses: dict[Any, frozenset[Any]] = {}
        #: The ways through the model that were checked: a pass's kinds of uses, whatever the lengths of inputs.
        self._ways: set[frozenset[Any]] = set()
        #: Whether a few rows of a batch extended the trace, and no whole batch was checked since.
        self._extended = False

    def is_new(self, call: Call, rows: int) -> bool:
        """Whether a call has tensors, sizes or choices that no call before had."""
        found = dict(leaves(call))
        known = not self._uses or self._inputs(found) | options(call, self.free_texts) in self._uses
        return not (known and self._has_known_carriers(found, rows))

    def find_carriers(self, call: Call, rows: int) -> None:
        """Decide again what carries rows where the trace does not say so of a call's tensors and sizes.

        Raises ValueError for a call of another number of rows.
        """
        trace, found = self._trace, dict(leaves(call))
        lengths = [len(found[path]) for path in trace.carriers & found.keys() if found[path].dim()]
        if lengths and rows not in lengths:
            raise ValueError(wrong_rows(call, rows))
        if self._has_known_carriers(found, rows):
            return
        self.compared.clear()
        with unchanged(self._tracer.model):
            latest = self._tracer.trace(self._plain, call, rows)
        trace.carriers = latest.carriers | (trace.carriers - found.keys())
        trace.paths = trace.paths | latest.paths

    def extend(self, call: Call, rows: int) -> None:
        """Extend the trace by where a call goes that no call before went, as one without padding does.

        All rows are traced, since a few of them may go another way. Raises `UnsupportedUse` where this trace contradicts the
        first, or ways are too many to check.
        """
        if len(self._ways) > _MOST_WAYS:
            raise UnsupportedUse(f"batches go more than {_MOST_WAYS} ways through the model")
        self._extended = True
        self.compared.clear()
        with unchanged(self._tracer.model):
            self._trace.add(self._tracer.trace(self._plain, call, rows, (max(2, rows), max(2, rows) + 1)))

    def difference(self, call: Call, rows: int) -> UnsupportedUse | None:
        """What says that a call goes another way through the model than the trace; None if it does not."""
        try:
            self._require_same(call, rows)
        except UnsupportedUse as error:
            return error
        return None

    def compare(self, call: Call, rows: int, context: CaptureContext, *, checked: bool) -> bool:
        """Raise `UnsupportedUse` unless the trace says of this call, too, whose tokens are whose, and its uses are known.

        Uses are known by the shapes of inputs, or by the way that the pass went, if one that went so was ``checked``, as the
        first is; `UnseenUse` is raised if none was.

        Returns whether the shapes of the inputs tell those of the uses.
        """
        found, choices = dict(leaves(call)), options(call, self.free_texts)
        sizes = self._inputs(found)
        inputs, way = sizes | choices, _way(sizes, context)
        if checked or not self._ways:
            self._ways.add(way)
            self._extended = False
        if self._extended:
            raise UnseenUse("a few rows of a batch read parameters in a way that no whole batch did")
        # The shape of a list does not tell how long its entries are.
        shapes_suffice = RowNumbers not in map(type, found.values())
        if not shapes_suffice:
            inputs |= context.shapes
        # The first pass is the one that was traced.
        if self._uses and inputs not in self._uses:
            self._require_same(call, rows)
            self._count_texts(choices)
        known = self._uses.get(inputs, frozenset(context.shapes))
        gone = {operation for operation, _ in known - context.shapes} if context.shapes - known else set()
        for operation, shape in context.shapes - known:
            reason = f"the input of {operation} has shape {list(shape)} a row, by no reason of the batch's shapes"
            # A model that skips layers at random has other shapes too.
            if operation in gone and not self._trace.draws:
                raise UnsupportedUse(reason)
            if way not in self._ways:
                raise UnseenUse(reason)
        _remember(self._uses, inputs, known | context.shapes)
        return shapes_suffice

    def _require_same(self, call: Call, rows: int) -> None:
        with unchanged(self._tracer.model):
            self._tracer.require_same(self._trace, self._plain, call, rows)

    def _count_texts(self, choices: frozenset[Any]) -> None:
        self._texts |= {choice for choice in choices if isinstance(choice[1], str)}
        counts = Counter(path for path, _ in self._texts)
        self.free_texts = {path for path, count in counts.items() if count > _MOST_TEXTS}

    def _has_known_carriers(self, found: Mapping[Path, torch.Tensor], rows: int) -> bool:
        """Whether what carried rows in the traced calls does in this one, and nothing new does."""
        long = {path for path, t in found.items() if t.dim() and t.shape[0] == rows}
        carriers = self._trace.carriers & found.keys()
        return bool(carriers) and carriers <= long and not (long - carriers - self._trace.paths)

    def _inputs(self, found: Mapping[Path, torch.Tensor]) -> frozenset[Any]:
        """The shapes of a call's tensors; a row's, of those that carry rows."""
        carriers = self._trace.carriers
        return frozenset([(path, t.shape[1:] if path in carriers else t.shape) for path, t in found.items()])


def _remember(known: dict[Any, frozenset[Any]], key: Any, value: frozenset[Any]) -> None:
    """Keep a value, and forget the oldest of too many."""
    known[key] = value
    if len(known) > MOST_CALLS:
        del known[next(iter(known))]


def _way(inputs: frozenset[Any], context: CaptureContext) -> frozenset[Any]:
    """A pass's kinds of uses, in whose shapes the lengths of inputs are named and not told."""
    ordered = sorted(inputs, key=str)
    names = {size: (path, axis) for path, shape in reversed(ordered) for axis, size in enumerate(shape)}
    return frozenset(
        [(operation, tuple([names.get(size, size) for size in shape])) for operation, shape in context.shapes]
    )
