"""Two layers with something between them, and the engine's step on them against each row's own gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastdp.engine.engine import Engine
from tests.engine.reference import engine_for, feed, stepped
from tests.engine.runs import Batch, clipped_sum, error, one_by_one

EXACT = 1e-5
Step = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two layers with something between them, and a loss, both given as functions of the module."""

    def __init__(
        self,
        middle: Step = lambda net, h: h,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda o, y: F.cross_entropy(o, y),
        before: Step = lambda net, x: x,
        **own: nn.Module | nn.Parameter,
    ):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)
        self.steps = (before, middle, loss)
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        before, middle, loss = self.steps
        output = self.second(middle(self, torch.tanh(self.first(before(self, x)))))
        return {"loss": loss(output if output.dim() == 2 else output.mean(1), labels)}


def trained(model: nn.Module, data: Batch, bound: float = 0.5) -> Engine:
    """An engine after one micro-batch."""
    engine = stepped(model, data, bound)
    engine.close()
    return engine


def gap(engine: Engine, truth: list[Batch], bound: float = 0.5) -> float:
    """The relative error of an engine's sums against rows' own gradients."""
    got = {n: engine.accumulator.sums.get(n, torch.zeros_like(p)) for n, p in engine.parameters.items()}
    return error(got, clipped_sum(truth, bound))


def exact_batches(
    make: Callable[[], nn.Module],
    batches: Iterable[Batch],
    *,
    plain: Callable[[], nn.Module] | None = None,
    route: str = "uses",
    **options: Any,
) -> Engine:
    """Assert the same of each batch in turn, whose truth is a fresh (or a plain) model's, and what route the last took."""
    engine, tickets = engine_for(make(), 0.5, **options)
    for data in batches:
        feed(engine, tickets, data)
        named = {name: value for name, value in data.items() if plain is None or name in ("x", "labels")}
        assert gap(engine, one_by_one((plain or make)(), named)) < EXACT
    assert engine.route == route, engine.reason
    return engine


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(3)))


def mixed(net: Any, h: torch.Tensor) -> torch.Tensor:
    """A learned mixture of three things from a copy of the parameter: no fast rule knows what was written."""
    return mixture(h, torch.empty(net.mix.shape, dtype=h.dtype).copy_(net.mix))


def mixture(h: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    return (torch.stack([h, 2 * h, h.sin()]) * mix.softmax(0).view(3, *[1] * h.dim())).sum(0)


def steps(h: torch.Tensor) -> torch.Tensor:
    """Four steps of time a row."""
    return h.unsqueeze(1) * torch.arange(1.0, 5.0).to(h).view(1, 4, 1)
