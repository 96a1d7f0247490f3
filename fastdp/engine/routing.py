"""Which route a model's gradients take: decided at the first batch by one trace, and kept true for later ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from fastdp.calls.batches import Call, Inputs, Path, RowNumbers, as_long_as, leaves, options, wrong_rows
from fastdp.calls.modes import autocast_now, refuse_mixing
from fastdp.calls.randomness import unchanged
from fastdp.distributed.ranks import RankLost, Ranks
from fastdp.engine.capture.trace import Trace, Tracer
from fastdp.engine.errors import (
    Differentiates,
    FlatBags,
    OwnLoss,
    SelfCheckError,
    Unseen,
    UnsupportedUse,
    Untraceable,
    first_line,
)
from fastdp.engine.loss.boundary import Junction
from fastdp.engine.passes import ORDINARY, USES, Pass, Passes
from fastdp.engine.uses.layout import Ticket
from fastdp.engine.uses.use import Tap

#: Each is looked at as the first batch is.
_MOST_WAYS = 16


class Routing:
    """Choose the route of the first batch, and explain later batches by its trace.

    This class verifies nothing: `fastdp.verify.Checks` fills in the hooks ``verify_*``, which do nothing here.

    Args:
        passes: of the model.
        ranks: the processes that train together.
        on_route: called with the route, and why, once it is known.

    Attributes:
        enabled: whether batches are verified.
        waiting_probes: batches for the training loop alone that have not gone through it yet; nothing is released before.
    """

    enabled = False
    waiting_probes = 0

    def __init__(self, passes: Passes, ranks: Ranks, on_route: Callable[[str, str | None], None]):
        self.passes, self.ranks, self._on_route = passes, ranks, on_route
        self._tracer = Tracer(passes.model, passes.read, passes.vocabulary)
        self.known = TraceCache(self._tracer, passes.forwards.root.plain)
        #: The rows and the shapes of the batch at hand.
        self._shapes: Any = None
        passes.explain = self._learn
        #: Microbatches of this logical batch that are looked at when ranks meet, and the one at hand if it is to be.
        self.looks: list[Callable[[], None]] = []
        self._later: Callable[[Tap], None] | None = None

    def before(self, call: Call, ticket: Ticket, inputs: Inputs) -> bool:
        """Prepare for a batch, whose tensors are ``inputs``, before its pass. True if this process ran the model for that."""
        passes = self.passes
        if passes.route == ORDINARY or passes.isolated:
            return False
        first = passes.route is None
        due = "" if first else self.due(call, ticket)
        self._shapes = ticket.rows, options(call), tuple([(path, t.shape) for path, t in inputs])
        new = not (first or passes.recollates or self._shapes in self.known.explained)
        new = new and self.known.new(passes.trace, call, ticket.rows)
        self._later = None
        looked = first or bool(due) or new
        if looked and not first and passes.weights.cut:
            # Other ranks would not follow in the middle of a logical batch.
            self._later, looked = partial(self._look_later, call, ticket, due, autocast_now(passes.device)), False
        elif looked:
            with passes.weights.apart():
                if first:
                    self._open(call, _weighted(ticket))
                else:
                    self._look(call, ticket, due, new=new)
        self.verify_loop(call, ticket)
        return looked

    def _look(self, call: Call, ticket: Ticket, due: str, *, new: bool) -> None:
        if new:
            self.known.add(self.passes.trace, call, ticket.rows)
        if due:
            self.verify_later(call, _weighted(ticket), due)

    def _look_later(
        self, call: Call, ticket: Ticket, due: str, precision: AbstractContextManager[Any], tap: Tap
    ) -> None:
        with precision:
            self._look(call, ticket, due, new=True)
            try:
                self.known.require(self.passes.trace, call, ticket.rows, tap, looked_at=False)
            except UnsupportedUse as error:
                self.passes.fall_back(str(error), ticket)

    def look_back(self) -> None:
        """Look at microbatches of this logical batch that could not be looked at before their passes."""
        looks, self.looks = self.looks, []
        for look in looks:
            look()

    def after(self, waiting: Pass, *, explained: bool) -> None:
        """Compare the uses of a batch's own pass with the trace. Raises `Unseen` if the batch must be explained first."""
        if self._later is not None:
            self.looks.append(partial(self._later, waiting.tap))
            return
        known, shapes, tap = self.known, self._shapes, waiting.tap
        new = known.explained.get(shapes) != tap.shapes
        if new and known.require(self.passes.trace, waiting.call, waiting.ticket.rows, tap, looked_at=explained):
            known.explained[shapes] = frozenset(tap.shapes)
        self.verify_pass(waiting)

    def explain(self, call: Call, ticket: Ticket) -> None:
        """Learn the path of a batch that reads parameters in another way than the first one did.

        Raises `UnsupportedUse` where no trace explains it, or its rows must be run alone.
        """
        passes, ticket = self.passes, _weighted(ticket)
        divided = passes.divided
        if passes.trace is None or not self.enabled:
            raise UnsupportedUse("a batch reads parameters in another way than the first one did")
        # A loop that goes on after a refusal finds nothing learned.
        with passes.trial(), passes.trace.trying():
            try:
                self._learn(call, ticket.rows)
                self.verify_rows(call, ticket)
                if passes.divided != divided:
                    raise UnsupportedUse("a later batch divides its loss by its rows and the first one did not")
                self.verify_engine(call, ticket)
            except SelfCheckError as error:
                # Rows that are run alone do not meet.
                raise UnsupportedUse(str(error)) from error
            finally:
                passes.divided = divided

    def _learn(self, call: Call, rows: int) -> None:
        self.known.explain(self.passes.trace, call, rows)
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

    def verify_pass(self, waiting: Pass) -> None:
        """Verify what a batch's own forward pass gave."""

    def run_probe(self, call: Call, ticket: Ticket, junction: Junction) -> Any:
        """Run a batch that only verifies the training loop."""
        # Nothing is missing: a router that verifies nothing plans no probe batches, so none of them can arrive here.
        raise NotImplementedError("only fastdp.verify.Checks hands out such batches")

    def abandon(self) -> None:
        """Forget probes of a logical batch that was discarded."""

    @contextmanager
    def tracing(self, call: Call, ticket: Ticket) -> Iterator[None]:
        """Watch the model's state while it is traced."""
        yield

    def _open(self, call: Call, ticket: Ticket) -> None:
        """Trace the model, verify its rows, and try the route of uses on a few of them."""
        passes = self.passes
        refuse_mixing(passes.model)
        with passes.trial():
            reason = self._decide(call, ticket)
        if reason is not None:
            passes.fall_back(reason, ticket)
        self._on_route(str(passes.route), reason)

    def _decide(self, call: Call, ticket: Ticket) -> str | None:
        """Why the one-example route is taken, or None. Raises ValueError for a model that no route serves."""
        passes = self.passes
        with self.tracing(call, ticket):
            passes.trace = self._trace(call, ticket)
        passes.forwards.leave_out(passes.trace.heads)
        reason = passes.trace.conflict
        try:
            # Otherwise losses cannot be told apart by row, and nothing can be compared.
            if passes.trace.mapped:
                self._verify_rows(call, ticket)
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
        try:
            return self._tracer.trace(self.passes.forwards.root.original, call, ticket.rows)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            alone = ticket.source is not None and ticket.source.sources(call) is not None
            known = isinstance(error, Untraceable) and not (alone and isinstance(error, FlatBags))
            # Other ranks would not follow where weights are in pieces.
            if known or self.passes.weights.cut:
                raise
            reason = str(error)
            if isinstance(error, FlatBags):
                self.passes.recollates = True
            elif not isinstance(error, Differentiates):
                try:
                    with torch.no_grad():
                        self.passes.plain_forward(*call[0], **call[1])
                except Exception:
                    if isinstance(error, IndexError):
                        # An id or a label is out of range: rows alone tell whose.
                        self.passes.run_rows(call, ticket)
                    raise error from None
                reason = f"the model fails on some rows of a batch: {first_line(error)}"
                self.passes.recollates = alone
            carriers = as_long_as(call, ticket.rows)
            return Trace([], carriers, carriers, {}, {}, [], mapped=False, conflict=reason)

    def _verify_rows(self, call: Call, ticket: Ticket) -> None:
        """`verify_rows`; of a loss of the model's own once more, with its means and sums over rows."""
        passes = self.passes
        try:
            self.verify_rows(call, ticket)
        except OwnLoss as error:
            passes.reductions = True
            try:
                self.verify_rows(call, ticket)
            except (UnsupportedUse, SelfCheckError):
                passes.reductions = False
                raise error from None

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
            return str(error) or type(error).__name__


def _weighted(ticket: Ticket) -> Ticket:
    """The ticket with every unit's weight 1, so that the padding row of an empty sample is verified like any other."""
    if bool(ticket.weights.any()):
        return ticket
    return dataclasses.replace(ticket, weights=torch.ones_like(ticket.weights))


class TraceCache:
    """The shapes of inputs that were explained, with those that uses then had.

    Args:
        tracer: of the model.
        plain: the model's own forward pass.
    """

    def __init__(self, tracer: Tracer, plain: Callable[..., Any]):
        self._tracer, self._plain = tracer, plain
        self._shapes: dict[Any, frozenset[Any]] = {}
        #: The ways through the model that were looked at: a pass's kinds of uses, whatever the lengths of inputs.
        self._ways: set[frozenset[Any]] = set()
        #: The uses of passes that were explained, by the rows and the shapes of their inputs: asked first.
        self.explained: dict[Any, frozenset[Any]] = {}
        #: Whether the trace has learned something since that no pass of a whole batch was looked at for.
        self.learned = False

    def new(self, first: Trace | None, call: Call, rows: int) -> bool:
        """Whether a call has tensors, or sizes, that need a look of their own."""
        assert first is not None
        found = dict(leaves(call))
        seen = not self._shapes or _inputs(first, found) | options(call) in self._shapes
        return not (seen and _plain(first, found, rows))

    def add(self, first: Trace | None, call: Call, rows: int) -> None:
        """Decide again what carries rows where a call has tensors, or sizes, that the first one did not explain.

        Raises ValueError for a call of another number of rows.
        """
        assert first is not None
        found = dict(leaves(call))
        lengths = [len(found[path]) for path in first.carriers & found.keys() if found[path].dim()]
        if lengths and rows not in lengths:
            raise ValueError(wrong_rows(call, rows))
        if _plain(first, found, rows):
            return
        self.explained.clear()
        with unchanged(self._tracer.model):
            latest = self._tracer.trace(self._plain, call, rows)
        first.carriers = latest.carriers | (first.carriers - found.keys())
        first.paths = first.paths | latest.paths

    def explain(self, first: Trace | None, call: Call, rows: int) -> None:
        """Have the trace learn where a call goes that it has not seen, as one without padding does.

        All rows are traced, since a few of them may go another way. Raises `UnsupportedUse` where this trace contradicts the
        first, or ways are too many to look at.
        """
        assert first is not None
        if len(self._ways) > _MOST_WAYS:
            raise UnsupportedUse(f"batches go more than {_MOST_WAYS} ways through the model")
        self.learned = True
        self.explained.clear()
        with unchanged(self._tracer.model):
            first.add(self._tracer.trace(self._plain, call, rows, (max(2, rows), max(2, rows) + 1)))

    def stray(self, first: Trace | None, call: Call, rows: int) -> UnsupportedUse | None:
        """What says that a call goes another way through the model than the first one did; None if it does not."""
        assert first is not None
        try:
            with unchanged(self._tracer.model):
                self._tracer.require_same(first, self._plain, call, rows)
        except UnsupportedUse as error:
            return error
        return None

    def require(self, first: Trace | None, call: Call, rows: int, tap: Tap, *, looked_at: bool) -> bool:
        """Raise `UnsupportedUse` unless a trace explains inputs of these shapes, and the uses' shapes follow from them.

        Or from the way that the pass went, if one that went so was ``looked_at``, as the first is; `Unseen` if none was.

        Returns whether the shapes of the inputs tell those of the uses.
        """
        assert first is not None
        found = dict(leaves(call))
        sizes = _inputs(first, found)
        inputs = sizes | options(call)
        if looked_at or not self._ways:
            self._ways.add(_way(sizes, tap))
            self.learned = False
        if self.learned:
            raise Unseen("a look at a few rows met what the batch as a whole was not looked at for")
        told = RowNumbers not in map(type, found.values())
        if not told:
            # The shape of a list does not tell how long its entries are.
            inputs |= tap.shapes
        # The first pass is the one that was traced.
        if self._shapes and inputs not in self._shapes:
            with unchanged(self._tracer.model):
                self._tracer.require_same(first, self._plain, call, rows)
        seen = self._shapes.setdefault(inputs, frozenset(tap.shapes))
        gone = {operation for operation, _ in seen - tap.shapes} if tap.shapes - seen else set()
        for operation, shape in tap.shapes - seen:
            reason = f"the input of {operation} has shape {list(shape)} a row, by no reason of the batch's shapes"
            if operation in gone:
                raise UnsupportedUse(reason)
            if _way(sizes, tap) not in self._ways:
                raise Unseen(reason)
        self._shapes[inputs] = seen | tap.shapes
        return told


def _way(inputs: frozenset[Any], tap: Tap) -> frozenset[Any]:
    """A pass's kinds of uses, in whose shapes the lengths of inputs are named and not told."""
    ordered = sorted(inputs, key=str)
    names = {size: (path, axis) for path, shape in reversed(ordered) for axis, size in enumerate(shape)}
    return frozenset([(operation, tuple([names.get(size, size) for size in shape])) for operation, shape in tap.shapes])


def _plain(first: Trace, found: Mapping[Path, torch.Tensor], rows: int) -> bool:
    """Whether what carried rows in the first call does in this one, and nothing new does."""
    long = {path for path, t in found.items() if t.dim() and t.shape[0] == rows}
    carriers = first.carriers & found.keys()
    return bool(carriers) and carriers <= long and not (long - carriers - first.paths)


def _inputs(first: Trace, found: Mapping[Path, torch.Tensor]) -> frozenset[Any]:
    """The shapes of a call's tensors; a row's, of those that carry rows."""
    return frozenset([(path, t.shape[1:] if path in first.carriers else t.shape) for path, t in found.items()])
