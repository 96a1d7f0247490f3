"""LSTM, GRU and plain recurrent nets, whole layers and single cells.

What the input adds to the gates of all steps is one product; only what the state adds runs step by step. The backward pass
of a cell is linear in the gradient of its state, with factors that are known for all steps at once, so that a step back is
a few products; the gradients of all gates, over a row's steps, are then the left factors of both matrices.

A step of the LSTM (i, f, g, o) is c' = f c + i g, h' = o tanh c'; of the GRU (r, z, n) it is h' = n + z (h - n) with
n = tanh(x_n + r h_n), as torch has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.factors import Factors
from fastdp.engine.lanes import PerLane
from fastdp.engine.reads import Reads
from fastdp.engine.uses import Tap, as_autocast

State = tuple[torch.Tensor, ...]


class _Run(NamedTuple):
    """A layer's pass over all steps: its states ``[steps, rows, width]``, the last state, and what its way back needs."""

    hidden: torch.Tensor
    last: State
    kept: tuple[torch.Tensor, ...]


class _Back(NamedTuple):
    """Gradients of what the input and what the state gave to the gates ``[steps, rows, gates]``, and of the first state."""

    inputs: torch.Tensor
    states: torch.Tensor
    first: State


def _before(values: torch.Tensor, first: torch.Tensor, backwards: bool) -> torch.Tensor:
    """Of values by step, those of the step before."""
    parts = [values[1:], first.unsqueeze(0)] if backwards else [first.unsqueeze(0), values[:-1]]
    return torch.cat(parts)


class _Lstm:
    gates = 4
    #: Whether both biases are added to the same sum, so that one is added for both.
    one_bias = True

    @staticmethod
    def forward(given: torch.Tensor, first: State, weight: torch.Tensor, bias: Any, backwards: bool) -> _Run:
        h, c = first
        weight = weight.t()
        hidden, cells = (given.new_empty(*given.shape[:2], h.shape[1]) for _ in range(2))
        width = h.shape[1]
        steps = list(zip(given, *given.split([2 * width, width, width], 2), *given.chunk(4, 2), hidden, cells))
        for whole, both, new, last, i, f, g, o, h_next, c_next in reversed(steps) if backwards else steps:
            whole.addmm_(h, weight)
            both.sigmoid_()
            new.tanh_()
            last.sigmoid_()
            torch.mul(f, c, out=c_next).addcmul_(i, g)
            torch.tanh(c_next, out=h_next).mul_(o)
            h, c = h_next, c_next
        return _Run(hidden, (h, c), (given, cells))

    @staticmethod
    def backward(
        run: _Run, first: State, weight: torch.Tensor, upstream: torch.Tensor, last: State, backwards: bool
    ) -> _Back:
        gates, cells = run.kept
        i, f, g, o = gates.chunk(4, 2)
        bent = cells.tanh()
        before = _before(cells, first[1], backwards)
        of_cell = torch.stack([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g)], 2)
        of_state, passed = bent * o * (1 - o), o * (1 - bent * bent)
        found = torch.empty_like(gates)
        split = found.unflatten(2, (4, -1))
        dh, dc = last
        steps = list(zip(upstream, of_cell, of_state, passed, f, found, split[:, :, :3], split[:, :, 3]))
        for up, cell, state, through, forget, whole, three, out in steps if backwards else reversed(steps):
            dh = dh + up
            dc = torch.addcmul(dc, dh, through)
            torch.mul(cell, dc.unsqueeze(1), out=three)
            torch.mul(dh, state, out=out)
            dh, dc = whole @ weight, dc * forget
        return _Back(found, found, (dh, dc))


class _Gru:
    gates = 3
    one_bias = False

    @staticmethod
    def forward(given: torch.Tensor, first: State, weight: torch.Tensor, bias: Any, backwards: bool) -> _Run:
        (h,) = first
        weight = weight.t()
        width = h.shape[1]
        hidden, gated = (given.new_empty(*given.shape[:2], width) for _ in range(2))
        steps = list(zip(given.split([2 * width, width], 2)[0], *given.chunk(3, 2), hidden, gated))
        for both, r, z, n, h_next, kept in reversed(steps) if backwards else steps:
            own = h @ weight if bias is None else torch.addmm(bias, h, weight)
            both.add_(own[:, : 2 * width]).sigmoid_()
            kept.copy_(own[:, 2 * width :])
            n.addcmul_(r, kept).tanh_()
            torch.lerp(n, h, z, out=h_next)
            h = h_next
        return _Run(hidden, (h,), (given, gated))

    @staticmethod
    def backward(
        run: _Run, first: State, weight: torch.Tensor, upstream: torch.Tensor, last: State, backwards: bool
    ) -> _Back:
        gates, gated = run.kept
        r, z, n = gates.chunk(3, 2)
        before = _before(run.hidden, first[0], backwards)
        new = (1 - z) * (1 - n * n)
        factors = torch.stack([new * gated * r * (1 - r), (before - n) * z * (1 - z), new * r], 2)
        found = torch.empty_like(gates)
        split = found.unflatten(2, (3, -1))
        reached = torch.empty_like(upstream)
        (dh,) = last
        steps = list(zip(upstream, factors, z, found, split, reached))
        for up, factor, keep, whole, parts, total in steps if backwards else reversed(steps):
            torch.add(dh, up, out=total)
            torch.mul(factor, total.unsqueeze(1), out=parts)
            dh = (total * keep).addmm_(whole, weight)
        inputs = torch.cat([found[:, :, : 2 * z.shape[2]], reached * new], 2)
        return _Back(inputs, found, (dh,))


class _Plain:
    gates = 1
    one_bias = True

    def __init__(self, bend: Callable[[torch.Tensor], torch.Tensor], slope: Callable[[torch.Tensor], torch.Tensor]):
        self.bend, self.slope = bend, slope

    def forward(self, given: torch.Tensor, first: State, weight: torch.Tensor, bias: Any, backwards: bool) -> _Run:
        (h,) = first
        weight = weight.t()
        for step in reversed(given.unbind(0)) if backwards else given.unbind(0):
            h = self.bend(step.addmm_(h, weight))
        return _Run(given, (h,), ())

    def backward(
        self, run: _Run, first: State, weight: torch.Tensor, upstream: torch.Tensor, last: State, backwards: bool
    ) -> _Back:
        found, slopes = torch.empty_like(run.hidden), self.slope(run.hidden)
        (dh,) = last
        steps = list(zip(upstream, slopes, found))
        for up, slope, whole in steps if backwards else reversed(steps):
            torch.mul(dh + up, slope, out=whole)
            dh = whole @ weight
        return _Back(found, found, (dh,))


_CELLS: dict[str, Any] = {
    "lstm": _Lstm(),
    "gru": _Gru(),
    "rnn_tanh": _Plain(torch.Tensor.tanh_, lambda h: 1 - h * h),
    "rnn_relu": _Plain(torch.Tensor.relu_, lambda h: (h > 0).to(h.dtype)),
}


class RecurrentUse(torch.autograd.Function):
    """One direction of one layer: x ``[steps, rows, n]`` and first states ``[rows, m]`` to states ``[steps, rows, m]``.

    Returns the states of all steps and the last state, of which the LSTM has two parts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        kind: str,
        backwards: bool,
        tap: Tap,
        trained: tuple[bool, ...],
        into: torch.Tensor,
        across: torch.Tensor,
        bias: torch.Tensor | None,
        own: torch.Tensor | None,
        *first: torch.Tensor,
    ) -> Any:
        cell = _CELLS[kind]
        ctx.tap, ctx.kind, ctx.backwards = tap, kind, backwards
        ctx.x_dtype, ctx.first_dtypes = x.dtype, [state.dtype for state in first]
        ctx.parameters = [p if chosen else None for p, chosen in zip((into, across, bias, own), trained)]
        x, into, across, bias, own = (as_autocast(t) for t in (x, into, across, bias, own))
        first = tuple(as_autocast(f) for f in first)
        with torch.autocast(x.device.type, enabled=False):
            given = F.linear(x, into, bias if own is None or not cell.one_bias else bias + own)
            run = cell.forward(given, first, across, None if cell.one_bias else own, backwards)
        ctx.kept = len(run.kept)
        ctx.save_for_backward(x, into, across, run.hidden, *run.kept, *first)
        # The last state is a view of what is kept.
        return run.hidden.clone(), *(state.clone() for state in run.last)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        upstream, *last = gradients
        x, into, across, hidden, *rest = ctx.saved_tensors
        run, first = _Run(hidden, (), tuple(rest[: ctx.kept])), tuple(rest[ctx.kept :])
        sink, layout = ctx.tap.open(), ctx.tap.layout
        back = _CELLS[ctx.kind].backward(run, first, across, upstream, tuple(last), ctx.backwards)

        def rows_first(t: torch.Tensor) -> torch.Tensor:
            return t.transpose(0, 1).flatten(0, 1)

        inputs = rows_first(back.inputs)
        states = inputs if back.states is back.inputs else rows_first(back.states)
        into_parameter, across_parameter, *biases = ctx.parameters
        if into_parameter is not None:
            sink.matrix(into_parameter, Factors(inputs, rows_first(x)), layout)
        if across_parameter is not None:
            before = _before(hidden, first[0], ctx.backwards)
            sink.matrix(across_parameter, Factors(states, rows_first(before)), layout)
        for bias, gradient in zip(biases, (back.inputs, back.states)):
            if bias is not None:
                sink.vector(bias, layout.by_lane(gradient.sum(0, dtype=torch.float32)), layout)
        found = (back.inputs @ into).to(ctx.x_dtype) if ctx.needs_input_grad[0] else None
        return found, *(None,) * 8, *(f.to(d) for f, d in zip(back.first, ctx.first_dtypes))


def _first(hx: Any, rows: int, tap: Tap) -> torch.Tensor:
    """First states ``[layers, rows, width]``; a learned one, repeated for every row, is each row's own."""
    if not isinstance(hx, PerLane):
        return hx
    if tap.layout.token_segments is not None or hx.dim() < 2 or hx.shape[-2] != rows or rows != tap.layout.rows:
        raise UnsupportedUse("a learned first state of a recurrent layer that is not one a row")
    return torch.diagonal(hx.lanes, 0, 0, -2).movedim(-1, -2)


def _layer(kind: str, reads: Reads, tap: Tap, input: Any, *rest: Any) -> Any:
    """`torch.lstm` and its like: all layers and directions."""
    packed = isinstance(rest[0], torch.Tensor) and rest[0].dtype == torch.int64
    weights = rest[2] if packed else rest[1]
    if not reads.serve(*weights):
        return NotImplemented
    if packed:
        raise UnsupportedUse(f"{kind} of a packed sequence, whose order the data choose")
    hx, _, biases, layers, dropout, training, both, batch_first = rest
    each = 4 if biases else 2
    directions = 2 if both else 1
    if len(weights) != each * layers * directions:
        raise UnsupportedUse(f"{kind} with a projection")
    reads.require_rows(kind, weights, _rows_first(input, *rest), tap)
    x = input if not batch_first else input.transpose(0, 1)
    first = [_first(state, x.shape[1], tap) for state in (hx if kind == "lstm" else (hx,))]
    lasts: list[State] = []
    for layer in range(layers):
        parts = []
        for direction in range(directions):
            place = layer * directions + direction
            own = tuple(weights[place * each : (place + 1) * each]) + (None,) * (4 - each)
            out, *last = RecurrentUse.apply(
                x,
                kind,
                direction == 1,
                tap,
                tuple(map(reads.is_trained, own)),
                *own,
                *(state[place] for state in first),
            )
            parts.append(out)
            lasts.append(tuple(last))
        x = parts[0] if directions == 1 else torch.cat(parts, 2)
        if dropout and training and layer + 1 < layers:
            x = F.dropout(x, dropout)
    return (x.transpose(0, 1) if batch_first else x), *(torch.stack(states) for states in zip(*lasts))


def _cell(kind: str, reads: Reads, tap: Tap, input: Any, hx: Any, *weights: Any) -> Any:
    """`torch.lstm_cell` and its like: one step."""
    if not reads.serve(*weights):
        return NotImplemented
    reads.require_rows(f"{kind}_cell", weights, input, tap)
    first = [_first(state, input.shape[0], tap) for state in (hx if kind == "lstm" else (hx,))]
    own = tuple(weights) + (None,) * (4 - len(weights))
    trained = tuple(map(reads.is_trained, own))
    _, *last = RecurrentUse.apply(input.unsqueeze(0), kind, False, tap, trained, *own, *first)
    return tuple(last) if kind == "lstm" else last[0]


def _rows_first(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The input of a whole layer with its rows first, as the trace looks at it."""
    return input if rest[-1] or input.dim() != 3 else input.transpose(0, 1)


def _named(kind: str, function: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    handler = functools.partial(rule, kind)
    handler.__name__ = function.__name__  # type: ignore[attr-defined]
    if rule is _layer:
        handler.operand = _rows_first  # type: ignore[attr-defined]
    return handler


HANDLERS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, kind): _named(kind, getattr(torch, kind), _layer) for kind in _CELLS},
    **{getattr(torch, f"{kind}_cell"): _named(kind, getattr(torch, f"{kind}_cell"), _cell) for kind in _CELLS},
}
