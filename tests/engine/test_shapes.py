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
from tests.engine.reference import engine_for, feed, ticket
from tests.engine.runs import clipped_sum, error, one_by_one

EXACT = 1e-5
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
    model = Branching(change)
    engine, tickets = engine_for(model, 0.5, verify=verify)
    for labelled, tokens in (([4, 4, 4, 4], 4), ([2, 6, 7, 1], 8), ([8, 8, 8, 8], 8), ([5, 1, 1, 5], 6)):
        data = sentences(labelled, tokens)
        feed(engine, tickets, data)
        truth = clipped_sum(one_by_one(Branching(change), data), 0.5)
        assert error(engine.accumulator.sums, truth) < EXACT, (labelled, tokens)
    assert engine.route == ("uses" if change == "gelu" else "one-example")


def test_a_branch_on_the_number_of_rows_is_checked_before_it_counts() -> None:
    class Crowded(Branching):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return super().forward(x + x.cumsum(0) if len(x) > 4 else x, labels)

    model = Crowded("none")
    engine, tickets = engine_for(model, 0.5)
    feed(engine, tickets, sentences([4] * 4, 4))
    engine.abandon()
    tickets.append(ticket(24))
    with pytest.raises(SelfCheckError, match="couple examples"):
        model(**sentences([4] * 24, 4))
