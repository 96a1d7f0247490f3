"""Tokens that are sorted by what the data say, and put back or not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastdp.engine.errors import SelfCheckError
from tests.cases import cases
from tests.engine.reference import Recording, norms, relative, stepped

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


def _run(back: Back) -> tuple[nn.Module, nn.Module, dict[str, torch.Tensor], object]:
    model = Mixture(back)
    plain = copy.deepcopy(model).double()
    torch.manual_seed(6)
    ids = torch.randint(0, WORDS, (4, 7))
    inputs = {"ids": ids, "labels": ids}
    engine = stepped(model, inputs, 0.5)
    return model, plain, inputs, engine


@cases("back", [by_writing, by_sorting])
def test_tokens_that_are_put_back_are_whose_they_were(back: Back) -> None:
    _, plain, inputs, engine = _run(back)
    assert engine.route == "uses", engine.reason
    trained = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    units = []
    for row in range(4):
        loss = plain(**{k: v[row : row + 1] for k, v in inputs.items()})["loss"]
        units.append(dict(zip(trained, torch.autograd.grad(loss, list(trained.values())))))
    scales = Recording.given[-1][0].double()
    assert relative(Recording.seen[-1][0], norms(units)) < 1e-5
    for name in trained:
        assert relative(engine.accumulator.sums[name], sum(s * u[name] for s, u in zip(scales, units))) < 1e-5, name


@cases("back", [not_at_all, by_another])
def test_tokens_left_in_an_order_of_the_data_are_nobodys(back: Back) -> None:
    with pytest.raises(SelfCheckError, match="couples rows|couple examples"):
        _run(back)
