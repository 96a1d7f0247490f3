"""Tokens that are sorted by what the data say, and put back or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastdp.engine.engine import Engine
from fastdp.engine.errors import SelfCheckError
from tests.cases import cases
from tests.engine.reference import require_exact, stepped
from tests.engine.runs import one_by_one

WIDTH, EXPERTS, WORDS = 8, 3, 13
Back = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by_writing(found: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return found[back]


def by_sorting(found: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return found[torch.argsort(order)]


def not_at_all(found: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return found


def by_another(found: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0]).flip(0)
    return found[back]


class Mixture(nn.Module):
    """Frozen experts between trained layers: tokens go to an expert each, in the order of the experts."""

    def __init__(self, back: Back):
        super().__init__()
        torch.manual_seed(5)
        self.back = back
        self.table = nn.Embedding(WORDS, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH), requires_grad=False)
        self.last = nn.Linear(WIDTH, WORDS)
        self.router.requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = self.table(ids)
        tokens = seen.reshape(-1, WIDTH)
        kinds, order = torch.sort(self.router(tokens).argmax(-1))
        parts = [tokens[order] @ self.experts[i] * (kinds == i).unsqueeze(1) for i in range(EXPERTS)]
        found = self.back(torch.tanh(sum(parts)), order).view_as(seen)
        return {"loss": F.cross_entropy(self.last(found).flatten(0, 1), labels.flatten())}


def _run(back: Back) -> tuple[list[dict[str, torch.Tensor]], Engine]:
    """Rows' own gradients, and the engine after their batch."""
    model = Mixture(back)
    torch.manual_seed(6)
    ids = torch.randint(0, WORDS, (4, 7))
    inputs = {"ids": ids, "labels": ids}
    return one_by_one(model, inputs), stepped(model, inputs, 0.5)


@cases("back", [by_writing, by_sorting])
def test_tokens_that_are_put_back_are_whose_they_were(back: Back) -> None:
    units, engine = _run(back)
    require_exact(engine, units)


@cases("back", [not_at_all, by_another])
def test_tokens_left_in_an_order_of_the_data_are_nobodys(back: Back) -> None:
    with pytest.raises(SelfCheckError, match="couples rows|couple examples"):
        _run(back)
