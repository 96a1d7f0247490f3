"""LSTM, GRU and plain recurrent nets, whole layers and single cells.

What the input adds to the gates of all steps is one product; only what the state adds runs step by step (`fastdp.ops.cells`).
The gradients of all gates, over a row's steps, are the left factors of both matrices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.uses.factors import Factors
from fastdp.engine.uses.lanes import PerExampleParameter
from fastdp.engine.uses.reads import Reads
from fastdp.engine.uses.use import CaptureContext, as_autocast
from fastdp.ops.cells import RECURRENT_CELLS, CellRun, State, shifted


class RecurrentUse(torch.autograd.Function):
    """One direction of one layer: x ``[steps, rows, n]`` and first states ``[rows, m]`` to states ``[steps, rows, m]``.

    The tensors are ``w_ih``, ``w_hh``, ``b_ih``, ``b_hh`` as of `torch.nn.LSTMCell`, then the first states. Returns the
    states of all steps and the last state, of which the LSTM has two parts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        kind: str,
        backwards: bool,
        context: CaptureContext,
        trained: tuple[bool, ...],
        *tensors: Any,
    ) -> Any:
        cell, parameters, first = RECURRENT_CELLS[kind], tensors[:4], tensors[4:]
        ctx.context, ctx.kind, ctx.backwards = context, kind, backwards
        ctx.x_dtype, ctx.first_dtypes = x.dtype, [state.dtype for state in first]
        ctx.parameters = [p if chosen else None for p, chosen in zip(parameters, trained)]
        x, w_ih, w_hh, b_ih, b_hh = (as_autocast(t) for t in (x, *parameters))
        first = tuple(as_autocast(f) for f in first)
        with torch.autocast(x.device.type, enabled=False):
            gates = F.linear(x, w_ih, b_ih if b_hh is None or not cell.one_bias else b_ih + b_hh)
            run = cell.forward(gates, first, w_hh, None if cell.one_bias else b_hh, backwards)
        ctx.kept = len(run.kept)
        ctx.save_for_backward(x, w_ih, w_hh, run.hidden, *run.kept, *first)
        # Cloned, since the last state is a view of what is saved for the backward pass.
        return run.hidden.clone(), *(state.clone() for state in run.last)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        upstream, *last = gradients
        x, w_ih, w_hh, hidden, *rest = ctx.saved_tensors
        run, first = CellRun(hidden, (), tuple(rest[: ctx.kept])), tuple(rest[ctx.kept :])
        sink, layout = ctx.context.open(), ctx.context.layout
        back = RECURRENT_CELLS[ctx.kind].backward(run, first, w_hh, upstream, tuple(last), ctx.backwards)

        def rows_first(t: torch.Tensor) -> torch.Tensor:
            return t.transpose(0, 1).flatten(0, 1)

        inputs = rows_first(back.inputs)
        states = inputs if back.states is back.inputs else rows_first(back.states)
        input_parameter, state_parameter, *biases = ctx.parameters
        if input_parameter is not None:
            sink.matrix(input_parameter, Factors(inputs, rows_first(x)), layout)
        if state_parameter is not None:
            before = shifted(hidden, first[0], ctx.backwards)
            sink.matrix(state_parameter, Factors(states, rows_first(before)), layout)
        for bias, gradient in zip(biases, (back.inputs, back.states)):
            if bias is not None:
                sink.vector(bias, layout.by_lane(gradient.sum(0, dtype=torch.float32)), layout)
        found = (back.inputs @ w_ih).to(ctx.x_dtype) if ctx.needs_input_grad[0] else None
        return found, *(None,) * 8, *(f.to(d) for f, d in zip(back.first, ctx.first_dtypes))


def _state(value: Any, context: CaptureContext) -> torch.Tensor:
    """States or inputs ``[..., rows, width]``; a learned one, repeated for every row, is each row's own."""
    if not isinstance(value, PerExampleParameter):
        return value
    if context.layout.token_segments is not None or value.dim() < 2 or value.shape[-2] != context.layout.rows:
        raise UnsupportedUse("a learned state or input of a recurrent layer that is not one a row")
    return torch.diagonal(value.lanes, 0, 0, -2).movedim(-1, -2)


def _layer(kind: str, reads: Reads, context: CaptureContext, input: Any, *rest: Any) -> Any:
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
    x = _state(input if not batch_first else input.transpose(0, 1), context)
    reads.require_rows(kind, weights, x.transpose(0, 1) if x.dim() == 3 else input, context)
    first = [_state(state, context) for state in (hx if kind == "lstm" else (hx,))]
    last_states: list[State] = []
    for layer in range(layers):
        parts = []
        for direction in range(directions):
            place = layer * directions + direction
            own = tuple(weights[place * each : (place + 1) * each]) + (None,) * (4 - each)
            trained, begin = tuple(map(reads.is_trained, own)), [state[place] for state in first]
            out, *last = RecurrentUse.apply(x, kind, direction == 1, context, trained, *own, *begin)
            parts.append(out)
            last_states.append(tuple(last))
        x = parts[0] if directions == 1 else torch.cat(parts, 2)
        if dropout and training and layer + 1 < layers:
            x = F.dropout(x, dropout)
    return (x.transpose(0, 1) if batch_first else x), *(torch.stack(states) for states in zip(*last_states))


def _cell(kind: str, reads: Reads, context: CaptureContext, input: Any, hx: Any, *weights: Any) -> Any:
    """`torch.lstm_cell` and its like: one step."""
    if not reads.serve(*weights):
        return NotImplemented
    input = _state(input, context)
    reads.require_rows(f"{kind}_cell", weights, input, context)
    first = [_state(state, context) for state in (hx if kind == "lstm" else (hx,))]
    own = tuple(weights) + (None,) * (4 - len(weights))
    trained = tuple(map(reads.is_trained, own))
    _, *last = RecurrentUse.apply(input.unsqueeze(0), kind, False, context, trained, *own, *first)
    return tuple(last) if kind == "lstm" else last[0]


def _rows_first(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The input of a whole layer with its rows first, as the trace looks at it."""
    return input if rest[-1] or input.dim() != 3 else input.transpose(0, 1)


_layer.operand = _rows_first  # type: ignore[attr-defined]
HANDLERS: dict[Any, Callable[..., Any]] = {
    getattr(torch, kind + end): functools.partial(rule, kind)
    for kind in RECURRENT_CELLS
    for end, rule in (("", _layer), ("_cell", _cell))
}
