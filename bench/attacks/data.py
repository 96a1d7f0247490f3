"""Attacks by hostile records: any record whatever, against honest code. The certified clip holds them."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp.engine.bounds import Norms
from fastdp.engine.clip.policy import Policy
from fastdp.engine.errors import SelfCheckError

from .kit import (
    Library,
    Model,
    Net,
    Record,
    Tagger,
    Task,
    Words,
    constant,
    distance,
    gpt2,
    net,
    outlier,
    padded,
    records,
    register,
    tokens,
    weakest,
)

attack = register("data", unmode={"self_check": False})
WIDTH = 256


class Pairs(Model):
    """One layer over tokens ``[rows, 2, WIDTH]``, the second of which counts against the first."""

    autocast = False
    parts = {"layer": lambda: nn.Linear(WIDTH, 256)}

    def forward(self, x: torch.Tensor, sign: torch.Tensor, labels: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return {"loss": F.cross_entropy((self.layer(x) * sign.unsqueeze(-1)).sum(1), labels)}


def pair(size: float, gap: float, seed: int) -> Record:
    """Two tokens of one size that nearly cancel."""
    x, d = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
    return {"x": torch.stack([size * x + gap * d, size * x]), "sign": torch.tensor([1.0, -1.0]), "labels": seed % 4}


def _cancel(library: Library, model: type[Model], seeds: range) -> float:
    plain = [pair(1.0, 1.0, seed) for seed in range(4)]
    extremes = [pair(size, gap, seed) for size in (1e3, 1e5) for gap in (1.0, 10.0) for seed in seeds]
    return weakest(lambda extreme: library.moved(Task(model), plain, extreme, 1e-3), extremes)


@attack("Two tokens of a record cancel, its norm is rounded to nothing, and it is not clipped.")
def cancelling_tokens(library: Library) -> float:
    return _cancel(library, Pairs, range(10, 13))


@attack("Under bfloat16 autocast, cancelling tokens are rounded before they meet, so the norm is wrong.")
def autocast(library: Library) -> float:
    return _cancel(library, net(Pairs, autocast=True), range(10, 12))


@attack("The square of a huge record's gradient norm overflows, and the record is not clipped.")
def huge_record(library: Library) -> float:
    def forward(own: Any, x: torch.Tensor, labels: torch.Tensor) -> Any:
        # Without a bounded activation, gradients grow as the record does.
        return {"loss": F.mse_loss(own.second(own.first(x))[:, 0], labels.float())}

    sizes = (1e4, 1e9, 1e12, 1e18, 1e25)
    return weakest(lambda size: library.moved(Task(net(forward=forward)), records(), outlier(size)), sizes)


@attack("A record that is not finite reaches every parameter.")
def nan_record(library: Library) -> float:
    values = (math.nan, math.inf, -math.inf)
    return weakest(lambda value: library.moved(Task(Net), records(), constant(value)), values)


@attack("A record's loss is finite and its gradient is not, and it reaches every parameter or has the model refused.")
def infinite_slope(library: Library) -> float:
    def between(_: Any, hidden: torch.Tensor) -> torch.Tensor:
        # The slope of a root at 0 is infinite, and 0 times that is no number.
        return hidden + 0 * torch.where(hidden.abs() > 0.999999, 0 * hidden, hidden).abs().sqrt()

    try:
        return max(
            library.moved(Task(net(between=between)), records(), outlier(1e9), first=first) for first in (False, True)
        )
    except SelfCheckError:
        # What is refused is the model, for what a record did.
        return math.inf


@attack("A record without a single label, or of one token, takes others with it.")
def no_labels(library: Library) -> float:
    ids = tokens(1, [6], seed=4)[0]["input_ids"]
    # What a record of nine tokens adds shows that something is clipped.
    odd = [{"input_ids": ids, "labels": torch.full_like(ids, -100)}, {"input_ids": ids[:1]}, *tokens(1, [9], seed=8)]
    return weakest(lambda record: library.moved(Task(gpt2, collate=padded), tokens(6, [6, 7]), record, 0.2), odd)


@attack("A record far longer than all before it changes the plan for its norm, and the clip with it.")
def long_record(library: Library) -> float:
    def forward(own: Any, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        return {"loss": F.cross_entropy(Tagger.forward(own, input_ids).flatten(0, 1), labels.flatten())}

    task = Task(net(Tagger, forward=forward), collate=padded, physical=2)
    return weakest(lambda n: library.moved(task, tokens(6, [4]), tokens(1, [n], seed=3)[0], 0.05), (63, 700, 3000))


class Bag(Model):
    parts = {"weight": lambda: nn.Parameter(torch.zeros(64, 64))}

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": F.binary_cross_entropy_with_logits(F.linear(x, self.weight).sum((1, 2)), labels)}


_add_rows = Norms.add_rows


def _by_the_longest(
    norms: Norms, groups: Any, powers: Any, errors: Any, products: Any = None, tokens: Any = None
) -> None:
    """Rounding of every record as of the longest one of its microbatch."""
    longest = None if tokens is None else tokens.amax(1, keepdim=True).expand_as(tokens).contiguous()
    _add_rows(norms, groups, powers, errors, products, longest)


@attack(
    "A long record of next to nothing raises the proven bounds of all others, whose tokens cancel, and so lowers their weights.",
    off={
        f"{Policy.__module__}.Policy.scales": Policy.scales,
        f"{Norms.__module__}.Norms.add_rows": _by_the_longest,
    },
)
def longest_record(library: Library) -> float:
    task = Task(Bag, collate=_longer)
    base, kept = (F.normalize(row, dim=0) for row in torch.randn(2, 64, generator=torch.Generator().manual_seed(1)))
    others = [{"x": torch.stack([base * 3e4 + kept / 2, -base * 3e4 + kept / 2]), "labels": 1.0}] * 16
    return weakest(
        lambda n: library.moved(task, others, {"x": torch.full((n, 64), 1e-9), "labels": 1.0}, 0.1), (64, 2048)
    )


def _longer(items: Any) -> dict[str, torch.Tensor]:
    longest = max(len(item["x"]) for item in items)
    x = torch.stack([F.pad(item["x"], (0, 0, 0, longest - len(item["x"]))) for item in items])
    return {"x": x, "labels": torch.tensor([item["labels"] for item in items])}


@attack("Tokens that share memory, by an axis of stride 0, are counted once.")
def expanded_tokens(library: Library) -> float:
    expanded = net(before=lambda own, x: x.unsqueeze(1).expand(-1, 64, -1), between=lambda own, hidden: hidden.sum(1))
    return weakest(lambda record: library.moved(Task(expanded), records(5), record, 0.05), records(3, 3.0, 5))


@attack("A table is embedding and head, and the norm of one of the two gradients is left out.")
def tied_table(library: Library) -> float:
    class Tied(Words):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.table.weight

    plain, extras = tokens(4, [5]), tokens(4, [3, 9], seed=2)
    return weakest(lambda record: library.moved(Task(Tied, collate=padded), plain, record, 0.05), extras)


@attack("The squares of norms above a tiny bound are zero in float32, and the record is not clipped.")
def tiny_bound(library: Library) -> float:
    class Faint(Model):
        parts = {"layer": lambda: nn.Linear(8, 1, bias=False)}

        def __init__(self, size: float) -> None:
            super().__init__()
            self.size = size
            nn.init.zeros_(self.layer.weight)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"loss": F.l1_loss(self.size * self.layer(x)[:, 0], torch.full((len(x),), -1.0))}

    (record,), sizes = records(1), [10.0**-power for power in (18, 20, 22, 24, 28, 34)]
    return weakest(lambda size: library.moved(Task(functools.partial(Faint, size)), [], record, size / 100), sizes)


@attack("One token stands in a record many times, and a sparse gradient counts it once.")
def sparse_gradients(library: Library) -> float:
    class Sparse(Model):
        parts = {"table": lambda: nn.Embedding(50, 16, sparse=True), "head": lambda: nn.Linear(16, 3)}

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"loss": F.cross_entropy(self.head(self.table(ids).sum(1)), labels)}

    plain = [{"ids": torch.arange(i, i + 8), "labels": i % 3} for i in range(5)]
    return library.moved(Task(Sparse), plain, {"ids": torch.full((8,), 40), "labels": 1}, 0.05)


@attack("Stock ModernBERT runs its head on masked tokens alone, and a record with many takes tokens of others.")
def sparse_prediction(library: Library) -> float:
    import transformers

    def model() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.ModernBertConfig(
            vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
            bos_token_id=1, cls_token_id=1, eos_token_id=2, sep_token_id=2, max_position_embeddings=32,
            sparse_prediction=True, attn_implementation="eager", reference_compile=False,
        )  # fmt: skip
        return transformers.ModernBertForMaskedLM(config)

    def record(masked: int, seed: int) -> Record:
        ids = torch.randint(3, 60, (8,), generator=torch.Generator().manual_seed(seed))
        labels = torch.where(torch.arange(8) < masked, ids, -100)
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}

    plain = [record(n, 20 + i) for i, n in enumerate([2, 2, 2, 2, 1, 3, 3, 1, 1, 2, 3])]
    return weakest(lambda n: library.moved(Task(model, physical=4), plain, record(n, 77), 0.05), (2, 6))


@attack("A recurrent layer sorts packed sequences by length, and their tokens are assigned to the wrong records.")
def packed_by_length(library: Library) -> float:
    class Recurrent(Model):
        parts = {
            "table": lambda: nn.Embedding(50, 8),
            "lstm": lambda: nn.LSTM(8, 8, batch_first=True),
            "head": lambda: nn.Linear(8, 3),
        }

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
            options: dict[str, Any] = {"batch_first": True, "enforce_sorted": False}
            lengths = attention_mask.sum(1).cpu()
            packed = nn.utils.rnn.pack_padded_sequence(self.table(input_ids), lengths, **options)
            _, (hidden, _) = self.lstm(packed)
            return {"loss": F.cross_entropy(self.head(hidden[-1]), labels[:, 0] % 3)}

    task = Task(Recurrent, collate=padded, physical=4)
    return weakest(lambda n: library.moved(task, tokens(12, [6, 3, 9, 4]), tokens(1, [n], seed=9)[0], 0.05), (2, 12))


@attack("Records lie in the channels of one grouped convolution, and an outlier is not clipped.")
def rows_as_channels(library: Library) -> float:
    class Grouped(Model):
        parts = {
            "weight": lambda: nn.Parameter(torch.randn(4, 1, 3)),
            "bias": lambda: nn.Parameter(torch.zeros(4)),
            "head": lambda: nn.Linear(4, 3),
        }

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            rows = len(x)
            weight, bias = self.weight.repeat(rows, 1, 1), self.bias.repeat(rows)
            hidden = F.conv1d(x.view(1, rows, -1), weight, bias, groups=rows).view(rows, 4, -1)
            return {"loss": F.cross_entropy(self.head(torch.tanh(hidden).mean(2)), labels)}

    task = Task(Grouped, physical=4)
    return weakest(lambda size: library.moved(task, records(9), outlier(size), 0.05), (1.0, 1e3))


@attack("A user's many rows, the same one again and again, count more than one user may.")
def user_rows(library: Library) -> float:
    (row,) = records(1, 5.0, 3)

    def released(ids: list[int], rows: list[Record]) -> Any:
        options = {"user_ids": ids, "max_examples_per_user": 4}
        return library.release(Task(Net, options=options), rows, 0.05).sums

    less, more = released([0, 1, 2], records(3)), released([0, 1, 2] + [9] * 6, [*records(3), *[row] * 6])
    return distance(more, less) / 0.05


def _along(library: Library, extra: Record) -> float:
    """Of DP-ZO, on a model whose loss grows as a record does."""

    def forward(own: Any, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": F.mse_loss(own.second(own.first(x))[:, 0], labels.float())}

    options = {"method": fastdp.DPZO(max_slope=0.05), "shapes": "public"}
    return library.moved(Task(net(forward=forward), options=options), records(), extra, 0.05)


@attack("Along DP-ZO's direction the loss of a huge record changes without bound, and its slope is not clipped.")
def huge_slope(library: Library) -> float:
    return weakest(lambda size: _along(library, outlier(size)), (10.0, 1e3, 1e9, 1e15))


@attack("A record whose losses are not finite at DP-ZO's two places makes the sum of slopes not finite.")
def nan_slope(library: Library) -> float:
    return weakest(lambda value: _along(library, constant(value)), (math.nan, math.inf, 1e30))


def _vote_for_all_nearest(records: torch.Tensor, _: Any, candidates: torch.Tensor, __: Any) -> torch.Tensor:
    gaps = torch.cdist(records, candidates)
    return (gaps == gaps.amin(1, keepdim=True)).sum(0)


@attack(
    "Candidates stand twice, or lie equally near, and a private record votes for each of them.",
    off={"fastdp.methods.votes.mechanism.vote_counts": _vote_for_all_nearest},
)
def equal_candidates(library: Library) -> float:
    def embed(texts: list[str]) -> torch.Tensor:
        return torch.tensor([[float(text.count(letter)) for letter in "ab"] for text in texts])

    def counts(texts: list[str]) -> torch.Tensor:
        # The same noise in both runs, whose difference is then the record's.
        budget: Any = {"target_epsilon": 1.0, "target_delta": 1e-3, "unsafe_seed": 1}
        return fastdp.PrivateVotes(texts, embed, rounds=1, **budget).count({"": ["a", "a", "b", "b"]})[""]

    return weakest(
        lambda extra: distance({"votes": counts(["a", "bb", extra])}, {"votes": counts(["a", "bb"])}),
        ("a", "ab", "", "c"),
    )
