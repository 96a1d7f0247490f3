"""Batches of other shapes than the traced one's are traced anew, and take the route that needs no rule where they differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastdp.engine.errors import SelfCheckError
from fastdp.engine.routing import Routing
from fastdp.verify import Checks
from tests.cases import cases, pairs
from tests.engine.nets import exact_batches
from tests.engine.reference import engine_for, feed

WIDTH = 5


class Branching(nn.Module):
    """Does ``change`` to tokens and labels where the shape says so."""

    def __init__(self, change: str, at: str = "tokens"):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, 7), nn.Linear(7, 3)
        self.change, self.at = change, at

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        many = x.shape[1] > 4 if self.at == "tokens" else x.shape[0] > 4
        x, labels = x.flatten(0, 1), labels.flatten()
        if many and self.change == "select":
            x, labels = x[labels != -100], labels[labels != -100]
        elif many and self.change == "sort":
            order = labels.argsort(stable=True)
            x, labels = x.index_select(0, order), labels.index_select(0, order)
        elif many and self.change == "gelu":
            x = F.gelu(x)
        elif self.change == "index":
            order = labels.argsort(stable=True) if many else torch.arange(len(labels))
            x, labels = x[order], labels[order]
        return {"loss": F.cross_entropy(self.head(torch.tanh(self.body(x))), labels)}


def sentences(labelled: list[int], tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    kept = torch.arange(tokens) < torch.tensor(labelled).unsqueeze(1)
    labels = torch.randint(0, 3, (len(labelled), tokens), generator=generator).masked_fill(~kept, -100)
    return {"x": torch.randn(len(labelled), tokens, WIDTH, generator=generator), "labels": labels}


@cases(*pairs(("change", ["select", "sort", "index", "gelu"]), ("verify", [Checks, Routing])))
def test_a_length_that_the_rows_divide_misleads_nobody(change: str, verify: type[Routing]) -> None:
    """The counts of tokens are the rows' multiples throughout."""
    batches = (([4, 4, 4, 4], 4), ([2, 6, 7, 1], 8), ([8, 8, 8, 8], 8), ([5, 1, 1, 5], 6))
    route = "uses" if change == "gelu" else "one-example"
    exact_batches(lambda: Branching(change), [sentences(*own) for own in batches], route=route, verify=verify)


def test_a_branch_on_the_number_of_rows_is_checked_before_it_counts() -> None:
    class Crowded(Branching):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return super().forward(x + x.cumsum(0) if len(x) > 4 else x, labels)

    engine, tickets = engine_for(Crowded("none"), 0.5)
    feed(engine, tickets, sentences([4] * 4, 4))
    with pytest.raises(SelfCheckError, match="couple examples"):
        feed(engine, tickets, sentences([4] * 24, 4))
