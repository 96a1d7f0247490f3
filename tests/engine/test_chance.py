"""Layers skipped at random, masks in any layout, and entries that a parameter replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases import cases
from tests.engine.nets import EXACT, Net, gap, parameter
from tests.engine.reference import assert_exact_step, engine_for, feed
from tests.engine.runs import collate, examples, one_by_one


class Deep(nn.Module):
    """Layers, most of which a draw may skip, with dropout before each."""

    def __init__(self, skips: Callable[[int], bool]):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))
        self.skips = skips
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        for number, layer in enumerate(self.layers):
            x = F.dropout(x, 0.1, self.training)
            if not self.skips(number):
                x = x + torch.tanh(layer(x))
        return {"loss": F.cross_entropy(self.head(x), labels)}


def test_sums_are_exact_whichever_layers_are_skipped() -> None:
    skipped: set[int] = set()
    model = Deep(lambda number: float(torch.rand(())) < 0.4 if engine.route is None else number in skipped).train()
    engine, tickets = engine_for(model, 0.5)
    drop, F.dropout = F.dropout, lambda x, *_: x
    try:
        for number, now in enumerate([set(), {0, 3}, {1, 2, 4, 5}, {5}]):
            skipped = now
            data = collate(examples(6, seed=number))
            feed(engine, tickets, data)
            assert not number or gap(engine, one_by_one(Deep(now.__contains__), data)) < EXACT
    finally:
        F.dropout = drop
    assert engine.route == "uses", engine.reason


def test_a_mask_belongs_to_entries_whatever_the_layout() -> None:
    """Time first, as XLNet has it: the engine's copies of a table lie otherwise in memory than a lookup's result."""

    class TimeFirst(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            scale = self.scale.expand(x.shape[1], 1, -1)
            h = F.dropout(torch.einsum("tbf,fgh->tbgh", x.t().unsqueeze(-1) * scale, self.weight), 0.5)
            return {"loss": F.cross_entropy(self.second(h.flatten(2).sum(0)), labels)}

    engine, tickets = engine_for(TimeFirst(weight=parameter(4, 2, 3), scale=parameter(4)), 0.5)
    feed(engine, tickets, collate(examples(6)))
    assert engine.route == "uses", engine.reason


def replace(index: Callable[[torch.Tensor], Any], *shape: int) -> Net:
    def before(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = x.unsqueeze(1) * torch.arange(1.0, 5.0)[:, None]
        h[index(h)] = net.token.sin()
        return h

    return Net(before=before, token=parameter(*shape))


INDICES = {
    "mask": (lambda h: h[..., 0] > 0, 5),
    "first": (lambda h: (slice(None), 0), 5),
    "slice": (lambda h: (slice(None), slice(1, 3)), 5),
    "places": (lambda h: (torch.arange(len(h)), h[..., 0].argmax(1)), 5),
    "row": (lambda h: (slice(None), slice(0, 1)), 1, 1, 5),
}


@cases("name", INDICES)
def test_entries_that_a_parameter_replaces_take_uses(name: str) -> None:
    index, *shape = INDICES[name]
    assert_exact_step(replace(index, *shape), collate(examples(6)))
