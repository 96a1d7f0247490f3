"""The one-example route: each row is a batch of its own, so that any model is differentiated exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from fastdp.calls.batches import Call, map_tensors, tensors
from fastdp.calls.errors import pass_writes
from fastdp.calls.outputs import SharedOutput
from fastdp.calls.randomness import BufferSnapshot
from fastdp.engine.loss.losses import LossTerms, intercepted
from fastdp.engine.uses.layout import Ticket
from fastdp.engine.uses.logits import Logits

_ONE_ROW = Ticket(torch.zeros(1, dtype=torch.int64), torch.ones(1), is_last=True)


def run_alone(
    model: torch.nn.Module,
    forward: Callable[..., Any],
    singles: Iterable[Call],
    ticket: Ticket,
    device: torch.device,
    derived_buffers: frozenset[str],
) -> list[Any]:
    """What the model returns for each row, which is a batch of its own.

    Buffers are restored after each row, so that none reaches the next one; those that follow from no data (``derived_buffers``,
    as a counter's) advance once. Raises ValueError, naming the example, for an id or a label that is out of range.
    """
    outputs, snapshot, advanced = [], BufferSnapshot(model), dict[str, torch.Tensor]()
    for row, (args, kwargs) in enumerate(singles):
        try:
            with intercepted(LossTerms(_ONE_ROW.layout(device), alone=True)):
                outputs.append(forward(*args, **kwargs))
            found = {n: b.clone() for n, b in model.named_buffers() if n in derived_buffers}
            for name, values in advanced.items():
                if not torch.allclose(values.double(), found[name].double(), equal_nan=True):
                    raise pass_writes(name)
            advanced = found
        except (IndexError, RuntimeError) as error:
            if type(error) not in (IndexError, RuntimeError):
                raise
            raise ticket.failure(row, error) from error
        finally:
            snapshot.restore()
    for name, values in advanced.items():
        model.get_buffer(name).copy_(values)
    return outputs


def backward_starts(
    rows: Sequence[int], parts: list[tuple[Any, Any]], scale: float, losses: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Where the backward pass of these rows starts in each pass, and with what: what arrived, times ``scale`` for outputs.

    With ``losses``, scalars are losses and not outputs.
    """
    tops, seeds = [], []
    for own, upstream in parts:
        for row in rows:
            for top, arrived in zip(own.targets[row], upstream or (1 / len(parts),)):
                if arrived is not None:
                    tops.append(top)
                    loss = losses and not top.dim()
                    seeds.append(torch.ones_like(top) * arrived if loss else _of_row(arrived, row, top) * scale)
    return tops, seeds


def _of_row(arrived: torch.Tensor, row: int, top: torch.Tensor) -> torch.Tensor:
    """What arrived for one row, without what `merged` has padded."""
    return arrived if arrived.shape == top.shape else arrived[row : row + 1][tuple(map(slice, top.shape))]


def merged(outputs: list[Any]) -> Any:
    """One output for all rows: tensors of rows concatenated, and padded by 0 to the longest; everything else from the first."""
    columns = [list(tensors(output)) for output in outputs]
    places = {t: place for place, t in enumerate(columns[0])}

    @cache
    def merge(t: torch.Tensor) -> torch.Tensor:
        parts = [column[places[t]] for column in columns]
        if isinstance(t, Logits):
            # Those of the first row alone are nobody's to read.
            t.source.close(lost=True)
            return t
        if t.dim() == 0 or SharedOutput.made(t) or any(p.dim() != t.dim() for p in parts):
            return t
        sizes = [max(own) for own in zip(*(p.shape for p in parts))]
        gaps = [[n for size, own in zip(sizes[:0:-1], p.shape[:0:-1]) for n in (0, size - own)] for p in parts]
        return torch.cat([F.pad(p, gap) if any(gap) else p for p, gap in zip(parts, gaps)])

    return map_tensors(outputs[0], merge)
