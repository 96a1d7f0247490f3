"""Layers skipped at random, masks in any layout, and entries that a parameter replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.cases import cases
from tests.engine.nets import Net, parameter
from tests.engine.reference import assert_exact_step, engine_for, feed
from tests.engine.runs import collate, examples


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
