"""Bags of embeddings against one example at a time."""

from __future__ import annotations

import torch
from torch import nn

from tests.cases import cases, pairs
from tests.engine.rules.exact import assert_exact_layer

IDS = torch.tensor([[1, 2, 1, 4], [3, 0, 0, 0], [4, 4, 4, 4], [0, 0, 0, 0]])


@cases(*pairs(("mode", ["sum", "mean", "max"]), ("padding_idx", [None, 0])))
def test_bags_of_rows(mode: str, padding_idx: int | None) -> None:
    layer = nn.EmbeddingBag(6, 5, mode=mode, padding_idx=padding_idx)
    assert_exact_layer(layer, IDS, two_pass=padding_idx is None)


class Flat(nn.Module):
    """Bags that are cut out of flat ids, two for each row, one of them empty at the third."""

    def __init__(self, mode: str, last: bool):
        super().__init__()
        self.last = last
        self.inner = nn.EmbeddingBag(6, 5, mode=mode, include_last_offset=last)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, size = ids.shape
        begins = (torch.arange(rows) * size).unsqueeze(1) + torch.tensor([0, 3])
        offsets = begins.flatten()
        if self.last:
            offsets = torch.cat([offsets, torch.tensor([rows * size])])
        weights = (
            {"per_sample_weights": ids.flatten().sin().to(self.inner.weight.dtype)} if self.inner.mode == "sum" else {}
        )
        return self.inner(ids.flatten(), offsets, **weights).unflatten(0, (rows, 2))


@cases("mode", ["sum", "mean", "max"])
def test_flat_ids_with_offsets(mode: str) -> None:
    assert_exact_layer(Flat(mode, last=mode == "mean"), IDS)


def test_a_table_that_is_also_a_head() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(6, 5, mode="sum")

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(torch.tanh(self.table(ids)), self.table.weight)

    assert_exact_layer(Tied(), IDS)


def test_rows_that_are_scaled_by_how_often_they_come_are_differentiated_alone() -> None:
    assert_exact_layer(nn.EmbeddingBag(6, 5, scale_grad_by_freq=True), IDS, route="one-example")
