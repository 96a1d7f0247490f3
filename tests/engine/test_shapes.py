"""Batches of other shapes than the traced one's are traced anew, and take the route that needs no rule where they differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastdp.engine import later
from fastdp.engine.errors import SelfCheckError
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


@pytest.mark.parametrize("change", ["select", "sort", "index", "gelu"])
def test_a_length_that_the_rows_divide_misleads_nobody(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No later batch is checked, and the counts of tokens are the rows' multiples throughout."""
    monkeypatch.setattr(later.Schedule, "due", lambda self, *_: False)
    monkeypatch.setattr(later.Schedule, "affordable", lambda self: False)
    model = Branching(change)
    engine, tickets = engine_for(model, 0.5)
    for labelled, tokens in (([4, 4, 4, 4], 4), ([2, 6, 7, 1], 8), ([8, 8, 8, 8], 8), ([5, 1, 1, 5], 6)):
        data = sentences(labelled, tokens)
        feed(engine, tickets, data)
        truth = clipped_sum(one_by_one(Branching(change), data), 0.5)
        assert error(engine.accumulator.sums, truth) < EXACT, (labelled, tokens)
    assert engine.route == ("uses" if change == "gelu" else "one-example")


def test_a_branch_on_the_number_of_rows_is_checked_before_it_counts() -> None:
    """What mixes beyond four rows is refused at the first batch of more, which an exhausted schedule would not look at.

    Half of the rows are drawn that other companions should not change; the first twelve of 24 notice none: 4e-7.
    """

    class Crowded(Branching):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return super().forward(x + x.cumsum(0) if len(x) > 4 else x, labels)

    model = Crowded("none")
    engine, tickets = engine_for(model, 0.5)
    feed(engine, tickets, sentences([4] * 4, 4))
    engine.abandon()
    engine.checks.schedule._next = 1 << 40
    tickets.append(ticket(24))
    with pytest.raises(SelfCheckError, match="couples examples"):
        model(**sentences([4] * 24, 4))


def test_brief_checks_are_early_and_then_even() -> None:
    """A clock that stands still costs nothing, so that the share of time is what the batches before took."""
    now = [0.0]
    schedule = later.Schedule(10_000, torch.device("cpu"))
    schedule._clock = lambda: now[0]
    with schedule.check():
        pass
    schedule.begin(8)
    found = []
    for batch in range(2, 10_001):
        now[0] += 1.0
        if schedule.due(8):
            found.append(batch)
            with schedule.check(brief=True):
                now[0] += 0.5
    gaps = [b - a for a, b in zip(found, found[1:])]
    assert found[:6] == [2, 3, 4, 6, 9, 13]
    assert 0.5 * len(found) <= 0.0075 * 10_000 + 0.5
    assert max(gaps) <= 1.5 * (10_000 - found[20]) / (len(found) - 20)
    assert found[-1] > 9_800
