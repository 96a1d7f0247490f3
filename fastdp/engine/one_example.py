"""The one-example route: each row is a batch of its own, so that any model is differentiated exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastdp.engine.batches import Call, map_tensors, take_rows, tensors, unpadded
from fastdp.engine.boundary import find_loss, plain_gradients
from fastdp.engine.layout import Layout, Ticket
from fastdp.engine.losses import LossTerms, intercepted
from fastdp.engine.selfcheck import Checked

NO_LOSS = (
    "the model returned no loss: pass labels to it, or state loss_reduction='mean' (or 'sum') to make_private and compute the "
    "loss outside"
)
_ONE_ROW = Ticket(torch.zeros(1, dtype=torch.int64), torch.ones(1), is_last=True)


def rows_alone(
    engine: Checked, call: Call, ticket: Ticket, layout: Layout
) -> tuple[list[Any], list[list[torch.Tensor]], Callable[[Any, bool], None]]:
    """Each row a batch of its own: its output, what a backward pass starts from, and that backward pass."""
    assert engine.trace is not None
    outputs = []
    for row in range(ticket.rows):
        single = take_rows(call, torch.tensor([row]), engine.trace.carriers)
        args, kwargs = unpadded(single, engine.trace.carriers) if engine.returns_loss else single
        with intercepted(LossTerms(_ONE_ROW.layout(layout.weights.device), alone=True)):
            outputs.append(engine.plain_forward(*args, **kwargs))
    if engine.returns_loss:
        losses = [find_loss(output) for output in outputs]
        if any(loss is None for loss in losses):
            raise ValueError(NO_LOSS)
        targets = [[loss] for loss in losses if loss is not None]
    else:
        targets = [[t for t in tensors(o) if t.requires_grad and t.dim() > 0] for o in outputs]

    def backward(upstream: Any, retain: bool) -> None:
        for unit in range(layout.units):
            if float(layout.weights[unit]) == 0:
                continue
            own = (ticket.row_units == unit).nonzero().reshape(-1).tolist()
            _one_unit(engine, unit, [(r, targets[r]) for r in own], upstream, layout, engine.scale(ticket))

    return outputs, targets, backward


def _one_unit(engine: Checked, unit: int, rows: list[Any], upstream: Any, layout: Layout, scale: float) -> None:
    tops, seeds = [], []
    for row, targets in rows:
        for position, tensor in enumerate(targets):
            if engine.returns_loss:
                tops.append(tensor)
                seeds.append(torch.ones_like(tensor))
            elif upstream[position] is not None:
                tops.append(tensor)
                seeds.append(upstream[position][row : row + 1] * scale)
    gradients = plain_gradients(tops, seeds, engine.read.values())
    instances = {
        name: gradient.float().unsqueeze(0) for name, gradient in zip(engine.read, gradients) if gradient is not None
    }
    engine.accumulator.add_unit(instances, layout.weights[unit : unit + 1])


def merged(outputs: list[Any]) -> Any:
    """One output for all rows: tensors with a row dimension concatenated, everything else from the first row."""
    columns = [list(tensors(output)) for output in outputs]
    position = iter(range(len(columns[0])))

    def merge(t: torch.Tensor) -> torch.Tensor:
        index = next(position)
        parts = [column[index] for column in columns]
        same = t.dim() > 0 and all(p.shape[1:] == t.shape[1:] for p in parts)
        return torch.cat(parts) if same else t

    return map_tensors(outputs[0], merge)
