"""Definition and companion checks: a row's loss in its batch is the loss of ``collate([example])``, run alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointError

from fastdp.engine.batches import Call, leaves, tensors
from fastdp.engine.boundary import require_loss
from fastdp.engine.errors import SelfCheckError, UnsupportedUse
from fastdp.engine.layout import Ticket
from fastdp.engine.losses import LossTerms, intercepted
from fastdp.engine.modes import in_mode
from fastdp.engine.passes import Passes
from fastdp.engine.randomness import preserve_rng, rng_state
from fastdp.verify.collation import Collation, example_length
from fastdp.verify.probe import DropoutDisabled, Probe, RowValues, cropped, rounding

#: Rows of a microbatch that are checked.
_ROWS = 3
#: How far gradients may move where losses may move by 1.
_GRADIENTS = 10.0
#: How far losses may move on a processor if shapes stay the same, relative to what other shapes may do.
_SAME_SHAPES = 1e-2
_DRAW = random.SystemRandom()
OVERFLOWS = "a row that is not finite reaches other rows (0 times NaN is NaN)"
PADDING = "padding changes this row's loss: pad on the right or pass position_ids and an attention mask"
UNDECIDED = (
    "the model or its collator draws random numbers that depend on the batch's shape, so rows were compared beside other "
    "companions and not alone"
)


def chosen_rows(ticket: Ticket) -> list[int]:
    """Up to three rows of a microbatch: its shortest, its longest, and one drawn at random."""
    lengths, rows = ticket.lengths, range(ticket.rows)
    if len(lengths) == ticket.rows:
        first = [min(rows, key=lengths.__getitem__), max(rows, key=lengths.__getitem__)]
    else:
        first = [0, ticket.rows - 1]
    rest = [row for row in rows if row not in first]
    # In the batch's own order, which some models need.
    return sorted({*first, *_DRAW.sample(rest, min(_ROWS - len(set(first)), len(rest)))})


class _Calls(NamedTuple):
    """What is compared: a call on the whole batch, and each chosen row collated and called alone."""

    whole: Call
    alone: dict[int, Call]
    draws: bool = False
    collated: bool = False


def check_definition(
    passes: Passes, call: Call, ticket: Ticket, rows: Sequence[int], *, gradients: bool = True
) -> list[str]:
    """Verify that these rows have the loss, and the gradients at their inputs, that they have alone.

    Args:
        passes: of the model.
        call, ticket: a microbatch; its ``source`` says how examples are collated alone.
        rows: to compare.
        gradients: whether gradients at the inputs are compared too.

    Returns what could not be decided, in sentences for the card.

    Raises:
        UnsupportedUse: if the rows must be run alone, or their losses cannot be told apart.
        SelfCheckError: if rows are coupled.
    """
    probe, source = Probe(passes, call, ticket), ticket.source
    calls = _calls(probe, source, rows)
    try:
        return _check(probe, calls, rows, gradients=gradients)
    except CheckpointError:
        # Checkpointed pieces are computed again with dropout: their losses alone are compared.
        return _check(probe, calls, rows, gradients=False)


def _check(probe: Probe, calls: _Calls, rows: Sequence[int], *, gradients: bool) -> list[str]:
    passes, ticket = probe.passes, probe.ticket
    for training in (True, False):
        try:
            upstream = torch.ones(1) if gradients and ticket.rows > 1 else None
            single = _alone(probe, calls, rows[0], training=training, upstream=upstream)
        except Exception:
            if training:
                raise
            return [UNDECIDED]
        if single.draws:
            continue
        base = _compare(probe, calls, rows, single, training, gradients=gradients)
        finite = [row for row in range(ticket.rows) if base is not None and base.finite(row)]
        if finite:
            # None of the chosen rows has a finite loss: others are compared.
            return check_definition(passes, probe.call, ticket, finite[:_ROWS], gradients=gradients)
        if base is not None and ticket.rows > 1 and passes.route is None:
            raise SelfCheckError(
                "No example of this batch has a finite loss. Check labels and inputs; nothing was released."
            )
        if base is not None and len(rows) < ticket.rows:
            # Training that diverged goes on, unless a row that is finite alone is not beside others.
            return check_definition(passes, probe.call, ticket, range(ticket.rows), gradients=False)
        return [UNDECIDED] if calls.draws else []
    probe.run(calls.whole, ticket.rows)
    return [UNDECIDED]


def _calls(probe: Probe, source: Collation | None, rows: Sequence[int]) -> _Calls:
    """The whole batch and single rows; collated anew where the tensors of the call are the loader's own."""
    call = probe.call
    sources = None if source is None else source.sources(call)
    if source is None or sources is None:
        return _Calls(call, {row: probe.rows([row]) for row in rows})
    # Long examples may be cropped at random, say, and short ones not.
    reads, collates = (any(drew) for drew in zip(*map(source.draws, rows)))
    if collates:
        _check_random_collator(source, rows)
        return _Calls(call, {row: probe.trimmed(probe.rows([row])) for row in rows}, draws=True)
    whole = call
    if reads:
        items = source.items(range(len(source.indices)))
        whole = source.call(call, sources, source.collated(items))
        chosen = [items[row] for row in rows]
    else:
        chosen = source.items(rows)
    try:
        batches = [source.collated([item]) for item in chosen]
    except Exception as error:
        raise ValueError(f"the collator fails on a single example, and sampling will draw one: {error}") from error
    alone = {row: source.call(call, sources, batch) for row, batch in zip(rows, batches)}
    return _Calls(whole, alone, collated=not reads)


def _check_random_collator(source: Collation, rows: Sequence[int]) -> None:
    """Raise `SelfCheckError` if, under one seed, a row that a collator makes follows from the other rows."""
    every = range(len(source.indices))
    lengths = [example_length(item) for item in source.items(rows)]
    longest = rows[max(range(len(rows)), key=lengths.__getitem__)]
    others = [row for row in every if row not in (rows[0], longest)]
    if not others:
        return
    items = source.items([rows[0], longest, others[0], others[-1]])
    batches = [dict(leaves(source.collated([*items[:2], other]))) for other in (items[2], items[3], items[0])]
    for path, one in batches[0].items():
        for other in (batch.get(path) for batch in batches[1:]):
            if other is None or one.shape != other.shape or not one.dim():
                continue
            if not torch.equal(one[0].nan_to_num(), other[0].nan_to_num()):
                raise SelfCheckError(
                    f"The collator makes an example's {path[-1]!r} from other examples too. Make each row from its own "
                    "example; nothing was released."
                )


def _compare(
    probe: Probe, calls: _Calls, rows: Sequence[int], single: RowValues, training: bool, *, gradients: bool
) -> RowValues | None:
    """Compare chosen rows; what the batch gave if none of them has a finite loss."""
    passes, ticket, count = probe.passes, probe.ticket, probe.ticket.rows
    tolerance = rounding(passes.model)
    whole, gradients = calls.whole, gradients and count > 1
    if count == 1:
        whole, count = probe.rows([0, 0], calls.whole), 2
    upstream = torch.full((count,), torch.nan).index_fill_(0, torch.tensor(rows), 1.0) if gradients else None
    base = probe.run(whole, count, training=training, upstream=upstream, single=single)
    one = torch.ones(1) if gradients else None
    if len(base.values) != len(single.values) or not base.values:
        raise UnsupportedUse("what the model returns for a row is not the same in a batch and alone")
    compared = 0
    for number, row in enumerate(rows):
        alone = single if number == 0 else _alone(probe, calls, row, training=training, upstream=one)
        if not alone.finite(0):
            continue
        compared += 1
        at = _place(base, alone, row, tolerance)
        if at is None:
            _explain(probe, calls, base, alone, row, count, tolerance, training)
        elif at != row and not torch.equal(ticket.row_units, torch.arange(ticket.rows)):
            raise SelfCheckError(
                "The collator changes the order of rows, so they cannot be assigned to users. Keep their order; "
                "nothing was released."
            )
        elif gradients and at == row:
            gap = base.input_gap(row, alone, 0)
            if gap > _GRADIENTS * tolerance:
                again = _alone(probe, calls, rows[0], training=training, upstream=one)
                if single.input_gap(0, again, 0) > _GRADIENTS * tolerance:
                    raise stateful()
                if gap == math.inf:
                    raise UnsupportedUse(OVERFLOWS)
                raise UnsupportedUse("the gradient at a row's inputs is another beside other rows than alone")
    if base.rest or single.rest:
        raise UnsupportedUse("the model adds a term of its own to torch's loss functions")
    return None if compared else base


def _alone(probe: Probe, calls: _Calls, row: int, **options: Any) -> RowValues:
    """A row collated and run alone. Raises ValueError, naming the example, if the model fails on it."""
    try:
        return probe.run(calls.alone[row], 1, **options)
    except (UnsupportedUse, SelfCheckError, ValueError, torch.OutOfMemoryError, CheckpointError):
        raise
    except Exception as error:
        source = probe.ticket.source
        example = f"example {source.indices[row]}" if source is not None else f"row {row}"
        reason = str(error).split("\n", 1)[0]
        raise ValueError(
            f"The model fails on {example} alone ({reason}). Remove or repair it, as sampling may draw it alone; nothing was "
            "released."
        ) from error


def _place(base: RowValues, alone: RowValues, row: int, tolerance: float) -> int | None:
    """The row of a batch that has the values of one run alone: its own, or another where a collator sorts."""
    every = [row, *(r for r in range(base.values[0].shape[0]) if r != row)]
    return next((r for r in every if base.gap(r, alone, 0) <= tolerance), None)


def _explain(
    probe: Probe,
    calls: _Calls,
    base: RowValues,
    alone: RowValues,
    row: int,
    count: int,
    tolerance: float,
    training: bool,
) -> None:
    """Raise for a row whose loss in the batch is another than alone, by what makes the difference."""
    cut = probe.rows([min(row, probe.ticket.rows - 1)], calls.whole)
    padded = probe.run(cut, 1, training=training)
    if not base.gap(row, padded, 0) <= tolerance:
        again = probe.run(
            calls.whole if count == probe.ticket.rows else probe.rows([0, 0], calls.whole), count, training=training
        )
        if base.finite(row) and not base.gap(row, again, row) <= tolerance:
            raise stateful()
        if not base.finite(row) or not _finite_inputs(calls.whole):
            raise UnsupportedUse(OVERFLOWS)
        raise coupled(probe, calls.whole, row)
    for (path, one), (_, other) in zip(leaves(cut), leaves(calls.alone[row])):
        if one.dim() == other.dim() and not torch.equal(*(t.nan_to_num() for t in cropped(one, other))):
            raise SelfCheckError(
                f"The collator makes an example's {path[-1]!r} otherwise beside others than alone. Make each row from its own "
                "example; nothing was released."
            )
    passes = probe.passes
    if passes.returns_loss and probe.run(probe.trimmed(cut), 1, training=training).gap(0, alone, 0) <= tolerance:
        raise UnsupportedUse(PADDING)
    if calls.collated and all(a[0].shape == b[0].shape for a, b in zip(base.values, alone.values)):
        # No mask shows the padding: the one-example route collates each example by itself.
        passes.recollates = True
        raise UnsupportedUse(PADDING)
    raise SelfCheckError(f"In {type(passes.model).__name__} {PADDING}; nothing was released.")


def _finite_inputs(call: Call) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors(call) if t.is_floating_point())


def check_companions(passes: Passes, call: Call, ticket: Ticket) -> None:
    """Verify that a row's loss or output, dropout included, is the same beside other rows in the same shapes.

    Raises `UnsupportedUse` if it is not, or if losses cannot be told apart by row.
    """
    probe = Probe(passes, call, ticket)
    if ticket.rows < 2:
        return
    beside = sorted({1, ticket.rows - 1})
    one, two = (
        probe.run(probe.rows([0, *companions]), 1 + len(companions), dropout=True)
        for companions in (beside, [0] * len(beside))
    )
    assert passes.trace is not None
    limit = rounding(passes.model)
    if not (passes.trace.selects or passes.device.type != "cpu"):
        limit *= _SAME_SHAPES
    if one.finite(0) and not one.gap(0, two, 0) <= limit:
        raise UnsupportedUse("a row's loss changes with the rows beside it")


def check_packed(passes: Passes, call: Call, ticket: Ticket) -> None:
    """Verify that packed examples have the loss that they have alone. Raises `SelfCheckError` if one has not."""
    probe = Probe(passes, call, ticket)
    layout, kind = ticket.layout(passes.device), passes.device.type
    assert layout.token_segments is not None
    shape = layout.token_segments.shape
    half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
    half |= any(parameter.dtype is torch.float16 for parameter in passes.model.parameters())
    if half or any(t.is_floating_point() and t.shape[:2] == shape for _, t in leaves(call)):
        raise SelfCheckError(
            "Packed rows need token ids and no float16: attention separates examples by zeros, and 0 times infinity is NaN. "
            "Use bfloat16 or float32."
        )
    together = probe.run(call, ticket.rows, packed=True)
    if together.draws:
        return
    source = ticket.source
    if source is not None and source.unit_map is not None and not any(source.draws(0)):
        for row in range(min(_ROWS, len(source.indices))):
            source.check_packed(row)
    segments = list(probe.segments())
    for unit, single in _DRAW.sample(segments, min(_ROWS, len(segments))):
        alone = probe.run(single, 1)
        if together.finite(unit) and not together.gap(unit, alone, 0) <= rounding(passes.model):
            raise SelfCheckError(
                "A packed example's loss changes beside the others of its row. Restart position_ids in each example and "
                "separate their attention; nothing was released."
            )


def check_alone(passes: Passes, call: Call, ticket: Ticket, rows: Sequence[int]) -> None:
    """Verify the one-example route: a row has the loss of ``collate([example])``, again after another row, and not of a pair.

    Raises what the model raises on one row, `SelfCheckError` if padding matters, or the model keeps state or scores rows
    against each other.
    """
    probe = Probe(passes, call, ticket)
    if not passes.returns_loss:
        args, kwargs = probe.rows([rows[0]])
        passes.plain_forward(*args, **kwargs)
        return
    calls = _calls(probe, ticket.source, rows)
    for mode in (nullcontext(), in_mode(passes.model, training=False)):
        with mode, preserve_rng(passes.model):
            before = rng_state(passes.model)
            own = {row: _loss(probe, _as_routed(probe, calls, row), 1) for row in rows}
            alone = {row: _loss(probe, calls.alone[row], 1) for row in rows}
            one, two = (_loss(probe, probe.rows([rows[-1]] * n, calls.whole), n) for n in (1, 2))
            again = _loss(probe, _as_routed(probe, calls, rows[-1]), 1)
            drew = rng_state(passes.model) != before
        if drew:
            continue
        tolerance = rounding(passes.model)
        if abs(again - own[rows[-1]]) > tolerance * abs(again):
            raise stateful()
        if any(abs(own[row] - alone[row]) > tolerance * abs(alone[row]) for row in rows):
            if calls.collated:
                passes.recollates = True
                return
            raise SelfCheckError(f"In {type(passes.model).__name__} {PADDING}; nothing was released.")
        if all(abs(two - n * one) > tolerance * max(abs(one), abs(two)) for n in (1, 2)):
            raise SelfCheckError(
                "Two copies of a row have another loss than one: the model scores rows against each other. Use per-row "
                "losses; nothing was released."
            )
        return


def _as_routed(probe: Probe, calls: _Calls, row: int) -> Call:
    """A row as the one-example route runs it."""
    return calls.alone[row] if probe.passes.recollates else probe.trimmed(probe.rows([row], calls.whole))


def _loss(probe: Probe, call: Call, rows: int) -> float:
    """The model's own loss on a call of so many rows, without dropout."""
    args, kwargs = call
    with torch.enable_grad(), DropoutDisabled(), intercepted(LossTerms(probe.layout(rows), alone=rows == 1)):
        return float(require_loss(probe.passes.plain_forward(*args, **kwargs)).detach())


def stateful() -> SelfCheckError:
    """The refusal of a model whose loss depends on earlier passes."""
    return SelfCheckError(
        "The model's loss depends on earlier batches (a queue, a running statistic, a hidden state). Remove that state; "
        "nothing was released."
    )


def coupled(probe: Probe, call: Call, row: int) -> SelfCheckError:
    """The refusal of a model in which a row's loss depends on others, naming the module where that begins."""
    count = probe.ticket.rows
    first = None
    if count > 1:
        copies = probe.rows([row] * count, call)
        seen = [_outputs(probe, made, row) for made in (call, copies)]
        first = next(
            (n for n, t in seen[0].items() if n in seen[1] and not torch.allclose(t, seen[1][n], 1e-4, 1e-6)), None
        )
    where = f", first in the output of {first}" if first else ""
    return SelfCheckError(
        f"The loss of row {row} changes when it is run alone{where}. Statistics, losses and capacities over the batch couple "
        "examples; nothing was released."
    )


def _outputs(probe: Probe, call: Call, row: int) -> dict[str, torch.Tensor]:
    """What each module returns for a row in one pass."""
    seen: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in probe.passes.model.named_modules():
        if name and not isinstance(module, torch.jit.ScriptModule):

            def note(_module: object, _args: object, output: object, name: str = name) -> None:
                found = next(tensors(output), None)
                if found is not None and found.dim() > 0 and found.shape[0] > row and found.is_floating_point():
                    seen.setdefault(name, found.detach()[row].clone())

            handles.append(module.register_forward_hook(note))
    try:
        with preserve_rng(probe.passes.model), DropoutDisabled(), torch.no_grad():
            probe.passes.plain_forward(*call[0], **call[1])
    finally:
        for handle in handles:
            handle.remove()
    return seen
