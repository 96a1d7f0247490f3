"""Layers that Opacus tests its per-sample gradients on and `bench.fuzz` does not draw: its own, packed rows, attention.

A case is one layer of a kind with random arguments, a linear head and a cross-entropy, on two batches of random sizes; its
norms and its clipped sum are compared with one example at a time in float64, as in `bench.fuzz`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fastdp.bench.fuzz import CLASSES, Block, Case, Choice, Outcome
from torch import nn

from fastdp.engine.clip.policy import Policy
from fastdp.engine.engine import Engine
from fastdp.engine.uses.layout import Ticket
from fastdp.verify import Checks

Batch = dict[str, torch.Tensor]


class Headed(nn.Module):
    """A layer applied to the batch's tensors, summed over all but the first and the last axis, and a head."""

    def __init__(self, layer: nn.Module, width: int):
        super().__init__()
        self.layer, self.out = layer, nn.Linear(width, CLASSES)

    def forward(self, labels: torch.Tensor, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.layer(**inputs))
        return {"loss": F.cross_entropy(self.out(hidden.flatten(1)), labels)}


def _headed(layer: nn.Module, draw: Callable[[], Batch]) -> Case:
    """The case of a layer whose output has one size a row for batches of any size."""
    batches = []
    for _ in range(2):
        batch = draw()
        rows = len(next(iter(batch.values())))
        batches.append(batch | {"labels": torch.arange(rows) % CLASSES})
    with torch.no_grad():
        first = {k: v for k, v in batches[0].items() if k != "labels"}
        width = layer(**first).flatten(1).shape[1]
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return Case(Headed(layer, width).train(), batches)


def _x(pick: Choice, *sizes: int, most: int = 4) -> Callable[[], Batch]:
    return lambda: {"x": torch.randn(pick.randint(1, most), *sizes)}


def _plain(module: nn.Module) -> nn.Module:
    return Block(lambda own, x: own.inner(x), inner=module)


def _turned(module: nn.Module) -> nn.Module:
    """A module over words that come first."""
    return Block(lambda own, x: own.inner(x.transpose(0, 1)).transpose(0, 1), inner=module)


def _recurrent(kind: str, *, own: bool, packed: bool = False) -> Callable[[Choice], Case]:
    def make(pick: Choice) -> Case:
        from opacus import layers

        words, width = pick.randint(1, 3), pick.randint(4, 5)
        first = pick.random() < 0.5
        options = {"bias": pick.random() < 0.5, "bidirectional": pick.random() < 0.5, "batch_first": first}
        made = getattr(layers, f"DP{kind}") if own else getattr(nn, kind)
        layer = made(width, pick.randint(8, 10), pick.choice((1, 2)), **options)

        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x if first else x.transpose(0, 1))[0]
            return out if first else out.transpose(0, 1)

        def pack(self: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            given = x if first else x.transpose(0, 1)
            order = nn.utils.rnn.pack_padded_sequence(given, lengths, batch_first=first, enforce_sorted=False)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.inner(order)[0], batch_first=first, total_length=words)
            return out if first else out.transpose(0, 1)

        def draw() -> Batch:
            rows = pick.randint(1, 3)
            x = torch.randn(rows, words, width)
            return {"x": x, "lengths": torch.randint(1, words + 1, (rows,))} if packed else {"x": x}

        return _headed(Block(pack if packed else run, inner=layer), draw)

    return make


def _attention(*, own: bool) -> Callable[[Choice], Case]:
    def make(pick: Choice) -> Case:
        from opacus import layers

        words, width = pick.randint(16, 20), 4
        options: dict[str, Any] = {name: pick.random() < 0.5 for name in ("bias", "add_bias_kv", "add_zero_attn")}
        if pick.random() < 0.5:
            options |= {"kdim": width, "vdim": width}
        made = layers.DPMultiheadAttention if own else nn.MultiheadAttention
        layer = made(width, pick.choice((1, 2)), **options)

        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            q = x.transpose(0, 1)
            return self.inner(q, q.sin(), q.cos())[0].transpose(0, 1)

        return _headed(Block(run, inner=layer), _x(pick, words, width))

    return make


def _sequence_bias(pick: Choice) -> Case:
    from opacus.layers.dp_multihead_attention import SequenceBias

    words, width, first = pick.randint(10, 20), pick.randint(4, 8), pick.random() < 0.5
    layer = SequenceBias(width, first)
    return _headed((_plain if first else _turned)(layer), _x(pick, words, width))


KINDS: dict[str, Callable[[Choice], Case]] = {
    **{f"{kind}, packed": _recurrent(kind, own=False, packed=True) for kind in ("RNN", "GRU", "LSTM")},
    **{f"DP{kind}": _recurrent(kind, own=True) for kind in ("RNN", "GRU", "LSTM")},
    **{f"DP{kind}, packed": _recurrent(kind, own=True, packed=True) for kind in ("RNN", "GRU", "LSTM")},
    "MultiheadAttention": _attention(own=False),
    "DPMultiheadAttention": _attention(own=True),
    "SequenceBias": _sequence_bias,
}


def case(kind: str, seed: int) -> Case:
    """The case of a kind and a seed."""
    torch.manual_seed(seed)
    return KINDS[kind](random.Random(f"{kind} {seed}"))


def flat_bags() -> Outcome:
    """What becomes of bags that the batch itself holds as flat ids and offsets, which no row can be cut out of."""
    model = Headed(Block(lambda own, x, offsets: own.inner(x, offsets), inner=nn.EmbeddingBag(9, 4)), 4).train()
    tickets = deque([Ticket(torch.arange(3), torch.ones(3), is_last=True)])
    engine = Engine(model, Policy((1.0,), (0.0,), {n: 0 for n, _ in model.named_parameters()}), tickets, verify=Checks)
    batch = {"x": torch.arange(8), "offsets": torch.tensor([0, 2, 5]), "labels": torch.arange(3)}
    try:
        model(**batch)["loss"].backward()
    except (RuntimeError, ValueError) as error:
        return Outcome("refused", "none", 0.0, str(error))
    return Outcome("wrong", str(engine.route), 0.0)
