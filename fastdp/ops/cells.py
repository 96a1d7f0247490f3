"""The recurrences of LSTM, GRU and plain recurrent nets over all steps, forward and backward.

The backward pass of a cell is linear in the gradient of its state. The factors are known for all steps at once, so a step
back is a few products.

As torch has them, a step of the LSTM (i, f, g, o) is c' = f c + i g, h' = o tanh c'. A step of the GRU (r, z, n) is
h' = n + z (h - n) with n = tanh(x_n + r h_n).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

State = tuple[torch.Tensor, ...]


class CellRun(NamedTuple):
    """A layer's pass over all steps: its states ``[steps, rows, width]``, the last state, and what its way back needs."""

    hidden: torch.Tensor
    last: State
    kept: tuple[torch.Tensor, ...]


class Back(NamedTuple):
    """Gradients of what the input and what the state gave to the gates ``[steps, rows, gates]``, and of the first state."""

    inputs: torch.Tensor
    states: torch.Tensor
    first: State


def shifted(values: torch.Tensor, first: torch.Tensor, backwards: bool) -> torch.Tensor:
    """Of values by step, those of the step before."""
    parts = [values[1:], first.unsqueeze(0)] if backwards else [first.unsqueeze(0), values[:-1]]
    return torch.cat(parts)


class _Lstm:
    gates = 4
    #: Whether both biases are added to the same sum, so that one is added for both.
    one_bias = True

    @staticmethod
    def forward(given: torch.Tensor, first: State, weight: torch.Tensor, bias: Any, backwards: bool) -> CellRun:
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
        return CellRun(hidden, (h, c), (given, cells))

    @staticmethod
    def backward(
        run: CellRun, first: State, weight: torch.Tensor, upstream: torch.Tensor, last: State, backwards: bool
    ) -> Back:
        gates, cells = run.kept
        i, f, g, o = gates.chunk(4, 2)
        bent = cells.tanh()
        before = shifted(cells, first[1], backwards)
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
        return Back(found, found, (dh, dc))


class _Gru:
    gates = 3
    one_bias = False

    @staticmethod
    def forward(given: torch.Tensor, first: State, weight: torch.Tensor, bias: Any, backwards: bool) -> CellRun:
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
        return CellRun(hidden, (h,), (given, gated))

    @staticmethod
    def backward(
        run: CellRun, first: State, weight: torch.Tensor, upstream: torch.Tensor, last: State, backwards: bool
    ) -> Back:
        gates, gated = run.kept
        r, z, n = gates.chunk(3, 2)
        before = shifted(run.hidden, first[0], backwards)
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
        return Back(inputs, found, (dh,))


class _Plain:
    gates = 1
    one_bias = True

    def __init__(self, bend: Callable[[torch.Tensor], torch.Tensor], slope: Callable[[torch.Tensor], torch.Tensor]):
        self.bend, self.slope = bend, slope

    def forward(self, given: torch.Tensor, first: State, weight: torch.Tensor, bias: Any, backwards: bool) -> CellRun:
        (h,) = first
        weight = weight.t()
        for step in reversed(given.unbind(0)) if backwards else given.unbind(0):
            h = self.bend(step.addmm_(h, weight))
        return CellRun(given, (h,), ())

    def backward(
        self, run: CellRun, first: State, weight: torch.Tensor, upstream: torch.Tensor, last: State, backwards: bool
    ) -> Back:
        found, slopes = torch.empty_like(run.hidden), self.slope(run.hidden)
        (dh,) = last
        steps = list(zip(upstream, slopes, found))
        for up, slope, whole in steps if backwards else reversed(steps):
            torch.mul(dh + up, slope, out=whole)
            dh = whole @ weight
        return Back(found, found, (dh,))


RECURRENT_CELLS: dict[str, Any] = {
    "lstm": _Lstm(),
    "gru": _Gru(),
    "rnn_tanh": _Plain(torch.Tensor.tanh_, lambda h: 1 - h * h),
    "rnn_relu": _Plain(torch.Tensor.relu_, lambda h: (h > 0).to(h.dtype)),
}
