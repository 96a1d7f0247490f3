"""Recurrent layers and cells against one example at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.cases import cases, pairs
from tests.engine.reference import engine_for, ticket
from tests.engine.rules.exact import assert_exact_layer


def states(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """All that a recurrent layer returns, rows first."""
    if layer.batch_first:
        out, last = layer(x)
    else:
        out, last = layer(x.transpose(0, 1))
        out = out.transpose(0, 1)
    parts = last if isinstance(last, tuple) else (last,)
    return torch.cat([out.flatten(1), *(part.transpose(0, 1).flatten(1) for part in parts)], 1)


@cases(
    *pairs(
        ("kind", [nn.LSTM, nn.GRU, nn.RNN]),
        (
            "options",
            [
                {"batch_first": True},
                {"num_layers": 2, "bidirectional": True, "bias": False},
                {"num_layers": 3, "batch_first": True},
            ],
        ),
    )
)
def test_layers(kind: type[nn.Module], options: dict[str, Any]) -> None:
    assert_exact_layer(kind(3, 5, **options), torch.randn(4, 7, 3), call=states, two_pass="bias" in options)


def test_a_plain_net_with_rectifiers_and_one_step() -> None:
    assert_exact_layer(nn.RNN(3, 5, nonlinearity="relu", batch_first=True), torch.randn(3, 6, 3), call=states)
    assert_exact_layer(nn.LSTM(3, 5), torch.randn(1, 1, 3), call=states)


class Unrolled(nn.Module):
    """A cell that is stepped by hand, from a first state of its own."""

    def __init__(self, cell: nn.Module):
        super().__init__()
        self.cell, self.first = cell, nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: Any = self.first.expand(len(x), -1)
        state = (state, torch.zeros_like(state)) if isinstance(self.cell, nn.LSTMCell) else state
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


@cases("cell", [nn.LSTMCell(3, 5), nn.GRUCell(3, 5), nn.RNNCell(3, 5, bias=False)])
def test_cells(cell: nn.Module) -> None:
    assert_exact_layer(Unrolled(cell), torch.randn(4, 3, 3))


def test_dropout_between_layers_draws_torch_s_masks() -> None:
    """The self-check compares with torch's own layers under the same random state, so the route says that they agree."""
    torch.manual_seed(0)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.LSTM(3, 6, 3, dropout=0.5, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"loss": nn.functional.cross_entropy(self.out(self.inner(x)[0][:, -1]), labels)}

    engine, tickets = engine_for(net := Last(), 1.0)
    tickets.append(ticket(4))
    net(x=torch.randn(4, 5, 3), labels=torch.arange(4) % 3)["loss"].backward()
    assert engine.route == "uses", engine.reason
