"""Convolutions whose "same" padding is uneven, and convolutions of packed rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastdp.engine.routing import Routing
from fastdp.engine.uses.layout import Ticket
from tests.cases import cases, pairs
from tests.engine.reference import engine_for
from tests.engine.rules.exact import assert_exact_layer

KERNELS = [
    (nn.Conv1d, {"kernel_size": 2}, (9,)),
    (nn.Conv1d, {"kernel_size": 4, "dilation": 3}, (11,)),
    (nn.Conv1d, {"kernel_size": 4, "groups": 2, "bias": False}, (6,)),
    (nn.Conv2d, {"kernel_size": (2, 3)}, (5, 6)),
    (nn.Conv2d, {"kernel_size": (4, 2), "dilation": (1, 3)}, (5, 6)),
    (nn.Conv3d, {"kernel_size": (2, 1, 4)}, (3, 2, 5)),
]


@cases(*pairs(("kind, options, sizes", KERNELS), ("two_pass", [False, True])))
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_even_kernels_are_padded_as_torch_pads_them(
    kind: type[nn.Module], options: dict[str, Any], sizes: tuple[int, ...], two_pass: bool
) -> None:
    assert_exact_layer(kind(2, 4, padding="same", **options), torch.randn(3, 2, *sizes), two_pass=two_pass)


class Packed(nn.Module):
    """Tokens of packed rows through a convolution of one token, or of as many as see their neighbours."""

    def __init__(self, kernel: int):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6), nn.Linear(70, 3)
        self.layer = nn.Conv1d(6, 70, kernel, padding="same", bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.layer(self.table(ids).mT).mT)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


@cases("kernel", [1, 3])
def test_a_convolution_of_packed_rows_is_refused_without_checks_as_well(kernel: int) -> None:
    """Its rule counts positions by rows, so that one that sees its neighbours' tokens would pass for theirs."""
    ids, labels = torch.randint(0, 7, (1, 9)), torch.randint(0, 3, (1, 9))
    model = Packed(kernel)
    engine, tickets = engine_for(model, 0.2, verify=Routing)
    tickets.append(Ticket(torch.arange(3), torch.ones(3), True, torch.tensor([[0, 0, 1, 2, 2, 2, 2, 2, 2]])))
    with pytest.raises(ValueError, match="packed rows"):
        model(ids=ids, labels=labels)["loss"].backward()
    assert not engine.accumulator.sums
