"""Matrices that are stored as [n, m] (HF's Conv1D) beside ones that are not, measured together as on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from fastdp.engine.clip import norms as norm_sinks
from fastdp.engine.routing import Routing
from tests.cases import pairs
from tests.engine.reference import Recording, engine_for, norms, ticket
from tests.engine.runs import clipped_sum, error, one_by_one

ROWS, TOKENS = 3, 4


class Mixed(nn.Module):
    """Narrow and wide layers of both kinds, none of them square."""

    def __init__(self, width: int):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [Conv1D(width, 6), nn.Linear(width, 5), Conv1D(7, 5), nn.Linear(7, width), Conv1D(3, width)]
        )
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": F.cross_entropy(x.mean(1), labels)}


@pytest.mark.parametrize(
    *pairs(
        ("device", ["processor", "interpreted GPU"]), ("route", ["instantiate", "gram", "direct"]), ("width", [9, 66])
    )
)
def test_swapped_factors_in_groups(request, monkeypatch, device, route, width):
    model = Mixed(width)
    batch = {"x": torch.randn(ROWS, TOKENS, 6), "labels": torch.arange(ROWS) % 3}
    truth = one_by_one(model, batch)
    if device != "processor":
        request.getfixturevalue("as_on_a_gpu")
    monkeypatch.setattr(norm_sinks, "may_hold", lambda device: 1 << 40)
    monkeypatch.setattr(norm_sinks, "launches", lambda device: True)
    monkeypatch.setattr(norm_sinks, "plan_route", lambda *sizes, **use: route)
    true = norms(truth)
    engine, tickets = engine_for(model, float(true.median()), verify=Routing)
    tickets.append(ticket(ROWS))
    engine.model(**batch)["loss"].backward()
    assert engine.route == "uses", engine.reason
    assert float((Recording.seen[-1][0] / true - 1).abs().max()) < 1e-5
    assert error(engine.accumulator.sums, clipped_sum(truth, float(true.median()))) < 2e-3
