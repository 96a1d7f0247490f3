"""Definition and companion checks: a row's loss in its batch is the loss of ``collate([example])``, run alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastdp.calls.autograd import graph_of
from fastdp.calls.batches import Call, cropped, leaves, row_of, tensors, unpadded
from fastdp.calls.collation import mixes
from fastdp.calls.flow import module_outputs
from fastdp.calls.modes import in_mode
from fastdp.calls.randomness import DropoutDisabled, preserve_rng, rng_state, seeds_for
from fastdp.calls.values import RowValues
from fastdp.engine.capture.follow import InputGradients
from fastdp.engine.errors import OwnLoss, SelfCheckError, UnsupportedUse
from fastdp.engine.loss.boundary import require_loss
from fastdp.engine.loss.losses import LossTerms, intercepted
from fastdp.engine.passes import Passes
from fastdp.engine.uses.layout import Ticket
from fastdp.validate import first_line
from fastdp.verify.probe import GRADIENT_TOLERANCE, Probe, same_shape_factor

OVERFLOWS = "a row that is not finite reaches other rows (0 times NaN is NaN)"
NO_LOSS = "No example of this batch has a finite loss. Check labels and inputs; this batch was not released."
PADDING_ERROR = "padding changes this row's loss: pad on the right or pass position_ids and an attention mask"
CHANGES = (
    "The model's loss changes between calls: it keeps a queue, statistic or counter. Count in a buffer, remove the rest; "
    "this batch was not released."
)
UNDECIDED = (
    "the loop, the model, its collator or the criterion draws random numbers that depend on the batch's shape, so rows were "
    "compared beside other companions and not alone"
)


@dataclass
class _Calls:
    """What is compared: a call on the whole batch, and chosen rows called alone, cut from it or collated by themselves."""

    whole: Call
    alone: dict[int, Call]
    draws: bool = False  # collation draws random numbers, so that rows are cut
    collated: bool = False  # rows are collated from the examples that the batch was made of

    @classmethod
    def of(cls, probe: Probe, rows: Sequence[int]) -> _Calls:
        """Collate rows anew where the tensors of the call are the loader's own; cut them from the batch otherwise."""
        call, source = probe.call, probe.ticket.source
        sources = None if source is None else source.sources(call)
        if source is None or sources is None:
            return cls(call, {row: probe.rows([row]) for row in rows})
        # Long examples may be cropped at random, say, and short ones not.
        reads, collates = map(any, zip(*map(source.draws, rows)))
        if collates:
            source.check_mixing(rows)
            return cls(call, {row: unpadded(probe.rows([row]), probe.carriers) for row in rows}, draws=True)
        read = range(len(source.indices)) if reads else rows
        items = dict(zip(read, source.items(read)))
        whole = source.call(call, sources, source.collated(list(items.values()))) if reads else call
        alone = {row: source.call(call, sources, source.single(items[row])) for row in rows}
        return cls(whole, alone, collated=not reads)


def check_definition(
    passes: Passes, call: Call, ticket: Ticket, rows: Sequence[int], *, gradients: bool = True
) -> tuple[list[str], RowValues | None]:
    """Verify that rows of a microbatch have the loss, and the gradients at their inputs, that they have alone.

    Returns what could not be decided, in sentences for the card, and the losses of all rows of the call, if they were compared.
    Raises `UnsupportedUse` if rows must be run alone, or their losses cannot be told apart, and `SelfCheckError` if rows are
    coupled.
    """
    probe = Probe(passes, call, ticket)
    calls = _Calls.of(probe, rows)
    for training in (True, False):
        comparison = _Comparison(probe, calls, rows, training, gradients and ticket.rows > 1)
        try:
            compared = comparison.run()
        except Exception as error:
            if training or PADDING_ERROR in str(error):
                raise
            return [UNDECIDED], None
        if compared:
            if more := comparison.base.unseen(rows) if comparison.base is not None and ticket.rows > 1 else []:
                return check_definition(passes, call, ticket, [*rows, *more], gradients=gradients)
            return [UNDECIDED] * calls.draws, comparison.base if training and calls.whole is call else None
        if comparison.base is not None and ticket.rows > 1:
            # None of the chosen rows has a finite loss: others are compared.
            if finite := [row for row in range(ticket.rows) if comparison.base.finite(row)]:
                return check_definition(passes, call, ticket, finite[:3], gradients=gradients)
            if passes.route is None:
                raise SelfCheckError(NO_LOSS)
            # Training that diverged goes on, unless a row that is finite alone is not beside others.
            every = range(ticket.rows) if len(rows) < ticket.rows else ()
            return check_definition(passes, call, ticket, every, gradients=False) if every else ([], None)
    probe.run(calls.whole, ticket.rows)
    return [UNDECIDED], None


class _Comparison:
    """Compares the rows of one pass on the whole batch with passes on single rows, in training or evaluation mode."""

    def __init__(self, probe: Probe, calls: _Calls, rows: Sequence[int], training: bool, gradients: bool):
        self.probe, self.calls, self.rows = probe, calls, rows
        self.training, self.gradients, self.tolerance = training, gradients, probe.rounding()
        # A batch of one row is compared as two copies of it.
        self.count = max(2, probe.ticket.rows)
        self.whole = probe.rows([0, 0], calls.whole) if probe.ticket.rows == 1 else calls.whole
        self.base: RowValues | None = None

    def run(self) -> bool:
        """Whether a row was compared: not if the model draws random numbers, or no row has a finite loss."""
        probe, rows = self.probe, self.rows
        alone = {row: self._alone(row) for row in rows}
        single = alone[rows[0]]
        # In evaluation some draw what they do not use: as many numbers, however many rows.
        if self.training and any(own.draws for own in alone.values()):
            return False
        # What flows to other rows must not reach these, not even as 0 times NaN.
        seeds = torch.full((self.count,), torch.nan).index_fill_(0, torch.tensor(rows), 1.0)
        upstream = seeds if self.gradients else None
        at = rows
        if None in single.shares:
            at = [row_of(self.calls.whole, self.count, self.calls.alone[row], row) for row in rows]
        places = dict(zip(at, alone.values()))
        base = probe.run(self.whole, self.count, upstream=upstream, singles=places, training=self.training)
        if len(base.values) != len(single.values) or not base.values:
            raise UnsupportedUse("the model returns something else for a row in a batch than alone")
        if any(own.draws != base.draws for own in alone.values()):
            return False
        self.base, compared = base, [row for row in rows if alone[row].finite(0)]
        for row in compared:
            self._require_same(base, row, alone[row])
        lost = [] if compared or probe.ticket.rows == 1 else [row for row in rows if base.finite(row)]
        if lost:
            # A statistic of one row (a variance, say) may not be finite where that of a batch is.
            self._explain(base, lost[0], alone[lost[0]])
        if base.rest or single.rest:
            raise OwnLoss("the model adds a term of its own to torch's loss functions")
        return bool(compared)

    def _alone(self, row: int) -> RowValues:
        """A row collated and run alone. Raises ValueError, naming the example, if the model fails on it."""
        try:
            return self._run(self.calls.alone[row])
        except (UnsupportedUse, SelfCheckError, ValueError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise self.probe.ticket.failure(row, error) from error

    def _require_same(self, base: RowValues, row: int, alone: RowValues) -> None:
        """Raise unless a row has the loss, and the gradients at its inputs, that it has alone."""
        ticket = self.probe.ticket
        self.tolerance = self.probe.rounding(alone.size(0))
        if self._alike(base, row, alone):
            return
        # A collator may sort: then another row holds this example, whose gradients may not have been asked for.
        at = row_of(self.calls.whole, self.count, self.calls.alone[row], row)
        if at == row or not base.gap(at, alone, 0) <= self.tolerance:
            self._explain(base, row, alone)
        if not torch.equal(ticket.row_units, torch.arange(ticket.rows)):
            raise SelfCheckError(
                "The collator changes the order of rows, so they cannot be assigned to users. Keep their order; this batch was "
                "not released."
            )

    def _alike(self, one: RowValues, row: int, other: RowValues) -> bool:
        """Whether a row has the loss, and the gradients at its inputs, of another pass on one row, but for rounding."""
        alike = one.gap(row, other, 0) <= self.tolerance
        return alike and not (self.gradients and one.input_gap(row, other, 0) > GRADIENT_TOLERANCE * self.tolerance)

    def _run(self, call: Call) -> RowValues:
        """One pass on one row."""
        return self.probe.run(call, 1, upstream=torch.ones(1) if self.gradients else None, training=self.training)

    def _explain(self, base: RowValues, row: int, alone: RowValues) -> NoReturn:
        """Raise for a row that has another loss in the batch than alone, or other gradients, by what makes the difference."""
        probe, losses = self.probe, not base.gap(row, alone, 0) <= self.tolerance
        # What flows back from other rows is NaN: where the losses differ, gradients tell nothing.
        self.gradients &= not losses
        cut = probe.rows([min(row, probe.ticket.rows - 1)], self.calls.whole)
        if self._alike(base, row, self._run(cut)):
            self._explain_padding(cut, row, alone)
        if alone.finite(0) and not self._alike(alone, 0, self._alone(row)):
            raise SelfCheckError(CHANGES)
        if not losses:
            infinite = base.input_gap(row, alone, 0) == math.inf
            raise UnsupportedUse(OVERFLOWS if infinite else "the gradient at a row's inputs changes beside other rows")
        inputs = (t for t in tensors(self.calls.whole) if t.is_floating_point())
        if not base.finite(row) or not all(bool(torch.isfinite(t).all()) for t in inputs):
            raise UnsupportedUse(OVERFLOWS)
        raise coupling_error(probe, self.calls.whole, row)

    def _explain_padding(self, cut: Call, row: int, alone: RowValues) -> NoReturn:
        """Raise for a row that has the same loss without its companions, and another if it is collated by itself."""
        probe, passes = self.probe, self.probe.passes
        for (path, one), (_, other) in zip(leaves(cut), leaves(self.calls.alone[row])):
            if one.dim() == other.dim() and not torch.equal(*(t.nan_to_num() for t in cropped(one, other))):
                raise mixes(path[-1])
        if passes.returns_loss and self._alike(self._run(unpadded(cut, probe.carriers)), 0, alone):
            raise UnsupportedUse(PADDING_ERROR)
        values = self._run(cut).values
        if self.calls.collated and all(a[0].shape == b[0].shape for a, b in zip(values, alone.values)):
            # No mask shows the padding: the one-example route collates each example by itself.
            passes.recollates = True
            raise UnsupportedUse(PADDING_ERROR)
        raise SelfCheckError(f"In {type(passes.model).__name__} {PADDING_ERROR}; this batch was not released.")


def check_companions(passes: Passes, call: Call, ticket: Ticket, base: RowValues | None = None) -> None:
    """Verify that a row's loss or output is the same beside other rows in the same shapes, and all rows' in reverse order.

    ``base`` is what they are in their order, if that could be compared. Raises `SelfCheckError` for a loss that changes, and
    `UnsupportedUse` where what the model draws may change it, or losses cannot be told apart by row.
    """
    if ticket.rows < 2:
        return
    # What a row draws may follow from what earlier rows drew.
    probe, last = Probe(passes, call, ticket), ticket.rows - 1
    order, place = ([*range(ticket.rows)], 0) if base is None else ([*range(last, -1, -1)], last)
    calls = [probe.rows(rows) for rows in (order, [0] * ticket.rows)]
    try:
        one, two = (probe.run(made, ticket.rows) for made in calls)
    except (UnsupportedUse, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedUse(f"the model fails on rows in another order: {first_line(error)}") from error
    # Atomic sums on a GPU round in another order each time.
    limit = probe.rounding() * same_shape_factor(passes) * (1 if passes.device.type == "cpu" else 10)
    if one.finite(place) and not one.gap(place, two, place) <= limit:
        # What rows draw may move what others draw; what they compute must not.
        if one.draws:
            raise UnsupportedUse("a row's loss changes with the rows beside it")
        raise coupling_error(probe, calls[0], place)
    if base is None or one.draws:
        return
    for place, row in enumerate(order):
        # A row rounds otherwise at another place.
        if base.finite(row) and not base.gap(row, one, place) <= probe.rounding(base.size(row)):
            raise coupling_error(probe, call, row)


def check_packed(passes: Passes, call: Call, ticket: Ticket) -> None:
    """Verify that packed examples have the loss that they have alone. Raises `SelfCheckError` if one has not."""
    probe, source, kind = Probe(passes, call, ticket), ticket.source, passes.device.type
    assert ticket.token_units is not None
    half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
    half |= any(parameter.dtype is torch.float16 for parameter in passes.model.parameters())
    if half or any(t.is_floating_point() and t.shape[:2] == ticket.token_units.shape for _, t in leaves(call)):
        raise SelfCheckError(
            "Packed rows need token ids and no float16: attention separates examples by zeros, and 0 times infinity is NaN. "
            "Use bfloat16 or float32."
        )
    together = probe.run(call, ticket.rows, packed=True)
    if source is not None and source.unit_map is not None and not any(source.draws(0)):
        for row in range(len(source.indices)):
            source.check_packed(row)
    segments = [] if together.draws else list(ticket.segments(call))
    for unit, single in random.SystemRandom().sample(segments, min(3, len(segments))):
        if together.finite(unit) and not together.gap(unit, probe.run(single, 1), 0) <= probe.rounding():
            raise SelfCheckError(
                "A packed example's loss changes beside the others of its row. Restart position_ids in each example and "
                "separate their attention; this batch was not released."
            )


def check_alone(passes: Passes, call: Call, ticket: Ticket, rows: Sequence[int]) -> None:
    """Verify the one-example route: a row has the loss of ``collate([example])``, again after others, and in a pair.

    Raises what the model raises on one row; `SelfCheckError` for padding that matters, state, and rows scored against others.
    """
    probe = Probe(passes, call, ticket)
    calls, tolerance = _Calls.of(probe, rows), probe.rounding()
    if not passes.returns_loss:
        args, kwargs = calls.alone[rows[0]]
        passes.plain_forward(*args, **kwargs)
        return
    # Rows that cannot be cut from a batch are collated together.
    source = ticket.source if passes.recollates else None
    copies = partial(source.copies, call, rows[0]) if source is not None else lambda _: None
    for mode in (nullcontext(), in_mode(passes.model, training=False)):
        with mode, preserve_rng(passes.model):
            before = rng_state(passes.model)
            alone = [_loss(probe, calls.alone[row]) for row in rows]
            own_rows = () if passes.recollates else rows
            own = [_loss(probe, unpadded(probe.rows([row], calls.whole), probe.carriers)) for row in own_rows]
            one, two = (_loss(probe, copies(n) or probe.rows([rows[0]] * n, calls.whole), stock=True) for n in (1, 2))
            again = _loss(probe, calls.alone[rows[0]])
            drew = rng_state(passes.model) != before
        if drew:
            continue
        if _differ(again, alone[0], tolerance):
            raise SelfCheckError(CHANGES)
        if any(_differ(a, b, tolerance) for a, b in zip(own, alone)):
            if not calls.collated:
                raise SelfCheckError(f"In {type(passes.model).__name__} {PADDING_ERROR}; this batch was not released.")
            passes.recollates = True
        if _differ(two, one, tolerance) and _differ(two, 2 * one, tolerance):
            raise SelfCheckError(
                "Two copies of a row have another loss than one: the model couples rows. Give each row its "
                "own loss; this batch was not released."
            )
        break
    check_mixed_derivative(probe, calls.whole)
    if math.isfinite(two) and not math.isfinite(one):
        raise SelfCheckError("A row alone has no finite loss, and two copies have: use a loss of each row by itself.")


def check_mixed_derivative(probe: Probe, call: Call) -> None:
    """Verify that the gradient at one row's inputs does not depend on another row's.

    Raises `SelfCheckError` if it does. Counts of tokens, by which a loss divides, have no derivative, and masks beside numbers
    are left out. Nothing is decided for a model without a second derivative, or without inputs that have one.
    """
    passes, last = probe.passes, probe.ticket.rows - 1
    # A deviation of two rows is linear in each.
    rows = sorted({0, last // 2, last})
    batch = probe.rows(rows, call)
    floats = {path: t for path, t in leaves(batch) if path in probe.carriers and t.is_floating_point()}
    masks = {path for path, t in floats.items() if bool(((t == 0) | (t == 1)).all())}
    inputs = InputGradients(batch, probe.carriers - (masks if len(masks) < len(floats) else set()), len(rows))
    with preserve_rng(passes.model), torch.enable_grad(), DropoutDisabled(), sdpa_kernel(SDPBackend.MATH):
        try:
            with inputs:
                total = require_loss(passes.forwards.root.plain(*inputs.call[0], **inputs.call[1]))
            if any(isinstance(node, BackwardCFunction) for node in graph_of(total)):
                # Such a backward pass may couple rows whose losses are not.
                return
            own = torch.autograd.grad(total, inputs.tensors, create_graph=True, allow_unused=True)
            first = [g[0] for g in inputs.rows_first(own) if g.requires_grad]
            mixed = torch.autograd.grad(
                [(g * seed).sum() for g, seed in zip(first, seeds_for(first))], inputs.tensors, allow_unused=True
            )
        except (RuntimeError, ValueError):
            return
    if any(bool((torch.isfinite(g[1:]) & (g[1:] != 0)).any()) for g in inputs.rows_first(mixed)):
        raise coupling_error(probe, call, 0)


def _loss(probe: Probe, call: Call, *, stock: bool = False) -> float:
    """The model's own loss on a call of one row, without dropout; of any number of rows with torch's ``stock`` losses."""
    args, kwargs = call
    terms = nullcontext() if stock else intercepted(LossTerms(probe.layout(1), alone=True))
    with torch.enable_grad(), DropoutDisabled(), terms:
        return float(require_loss(probe.passes.plain_forward(*args, **kwargs)).detach())


def _differ(one: float, other: float, tolerance: float) -> bool:
    """Whether two finite losses differ by more than rounding."""
    return math.isfinite(one - other) and not math.isclose(one, other, rel_tol=tolerance)


def coupling_error(probe: Probe, call: Call, row: int) -> SelfCheckError:
    """The refusal of a model in which a row's loss depends on others, naming the module where that begins."""
    copies = probe.rows([row] * probe.ticket.rows, call)
    one, two = (module_outputs(probe.passes.model, probe.passes.plain_forward, made, row) for made in (call, copies))
    first = next((n for n, t in one.items() if n in two and not torch.allclose(*cropped(t, two[n]), 1e-4, 1e-6)), None)
    where = f", first in the output of {first}" if first else ", though no module's output does"
    return SelfCheckError(
        f"The loss of row {row} changes when it is run alone{where}: never couple examples; this batch was not released."
    )
