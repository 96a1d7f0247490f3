"""Opacus's own layers, and recurrent layers over packed rows, against one example at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import cases, pairs
from tests.engine.reference import stepped, ticket
from tests.engine.rules.exact import Net, assert_exact_layer
from tests.engine.rules.test_recurrent import states

layers: Any = pytest.importorskip("opacus.layers")
WORDS, WIDTH = 4, 4
X = torch.randn(3, WORDS, WIDTH, generator=torch.Generator().manual_seed(0))


def packed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A row is as long as its first number says."""
    lengths = 1 + (x[:, 0, 0].abs() * 10).long() % WORDS
    order = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out: torch.Tensor = nn.utils.rnn.pad_packed_sequence(layer(order)[0], batch_first=True, total_length=WORDS)[0]
    return out


@cases(*pairs(("kind", ["RNN", "GRU", "LSTM"]), ("own", [True, False]), ("options", [{}, {"bidirectional": True}])))
def test_recurrent_layers(kind: str, own: bool, options: dict[str, Any]) -> None:
    def make() -> Any:
        return (getattr(layers, f"DP{kind}") if own else getattr(nn, kind))(WIDTH, 8, batch_first=True, **options)

    assert_exact_layer(make(), X, call=states)
    # The lengths choose which tokens a layer sees.
    assert_exact_layer(make(), X, call=packed, route="one-example")


def turned(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.transpose(0, 1)
    out: torch.Tensor = layer(x, x.sin(), x.cos())[0]
    return out.transpose(0, 1)


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "attention": (lambda: layers.DPMultiheadAttention(WIDTH, 2, add_bias_kv=True, add_zero_attn=True), turned),
    "attention without a bias": (lambda: layers.DPMultiheadAttention(WIDTH, 1, bias=False), turned),
    "a bias of sequences": (
        lambda: layers.dp_multihead_attention.SequenceBias(WIDTH, True),
        lambda layer, x: layer(x),
    ),
}


@cases("name", OTHERS)
def test_attention(name: str) -> None:
    make, call = OTHERS[name]
    assert_exact_layer(make(), X, call=call)


def test_flat_ids_beside_offsets_are_refused_by_name() -> None:
    """No row can be cut out of bags that the batch itself holds as flat ids and offsets."""
    bags = nn.EmbeddingBag(9, 4)

    class Bags(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor, offsets: torch.Tensor) -> Any:  # type: ignore[override]
            return {"loss": nn.functional.cross_entropy(self.out(bags(x, offsets)), labels)}

    model = Bags(bags, torch.zeros(1, 1, dtype=torch.int64), lambda layer, x: layer(x))
    batch = {"x": torch.arange(8), "offsets": torch.tensor([0, 2, 5]), "labels": torch.arange(3)}
    with pytest.raises(ValueError, match="layer.weight: flat ids beside offsets"):
        stepped(model, batch, 1.0, ticket(3))
