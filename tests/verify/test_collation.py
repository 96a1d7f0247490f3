"""What data sets and collators make of an example may be drawn at random, sorted or counted, and not made of other examples."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fastdp
from fastdp.calls.collation import Collation
from fastdp.engine.errors import SelfCheckError
from fastdp.private.run import Private
from tests.cases import cases
from tests.engine.runs import CLIPPED, Batch, clipped_sum, collate, error, examples, start
from tests.loops import train_epoch, trained

BOUND = 0.5


def begin(data: Any, make: Callable[[Any], Any] = collate, model: nn.Module | None = None, **options: Any) -> Private:
    batches = DataLoader(data, batch_size=len(data), collate_fn=make)
    return start(model, batches, epochs=6, method=fastdp.DPSGD(max_grad_norm=BOUND), **options)


def mixup(items: Any) -> Batch:
    batch = collate(items)
    return batch | {"x": 0.7 * batch["x"] + 0.3 * batch["x"].roll(1, 0)}


def drawn_mixup(items: Any) -> Batch:
    batch = collate(items)
    return batch | {"x": 0.7 * batch["x"] + 0.3 * batch["x"][torch.randperm(len(items))]}


def rare_mixup(items: Any) -> Batch:
    return mixup(items) if random.random() < 0.2 else collate(items)


own = random.Random(0)


def own_mixup(items: Any) -> Batch:
    return mixup(items) if own.random() > 0.8 else collate(items)


@cases("make", [mixup, drawn_mixup, rare_mixup, own_mixup])
def test_collators_that_mix_examples_are_refused(make: Callable[[Any], Batch]) -> None:
    private = begin(examples(24), make)
    with pytest.raises(SelfCheckError, match="this batch was not released"):
        train_epoch(private)
    assert private.steps_done == 0


def ordered(items: Any) -> Batch:
    return collate(sorted(items, key=lambda item: float(item["x"].sum())))


class Even(nn.Module):
    """Gives all rows nearly one loss: which row is whose follows from what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3, bias=False)
        nn.init.normal_(self.head.weight, std=1e-6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.head(x), labels)}


@cases("seed", range(4))
def test_a_collator_may_sort_rows_whose_losses_are_alike(seed: int) -> None:
    private = begin(examples(12, seed=seed), ordered, Even())
    train_epoch(private)
    assert private.route == "uses"


class Averaging(list[Any]):
    """Subtracts a running mean of all examples that were read."""

    mean = torch.zeros(5)

    def __getitem__(self, index: Any) -> Any:
        example = super().__getitem__(index)
        self.mean = 0.9 * self.mean + 0.1 * example["x"]
        return example | {"x": example["x"] - self.mean}


def test_a_data_set_that_remembers_is_refused() -> None:
    private = begin(Averaging(examples(24)))
    with pytest.raises(SelfCheckError, match="this batch was not released"):
        train_epoch(private)
    assert private.steps_done == 0


def test_a_collator_that_fails_on_one_example_is_told_before_a_release() -> None:
    def several(items: Any) -> Batch:
        if len(items) < 2:
            raise IndexError("no second example")
        return collate(items)

    private = begin(examples(24), several)
    with pytest.raises(ValueError, match="the collator fails on a single example"):
        train_epoch(private)
    assert private.steps_done == 0


class Tokens(nn.Module):
    """Words with places, whose attention is over the packed example alone or over the whole row."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places, self.head = nn.Embedding(61, 6), nn.Embedding(64, 6), nn.Linear(6, 61)
        self.apart = apart

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor) -> Any:
        hidden = torch.tanh(self.words(input_ids) + self.places(position_ids))
        example = (position_ids == 0).cumsum(1)
        near = torch.ones_like(example[:, None] == example[:, :, None])
        near = (example[:, None] == example[:, :, None]) if self.apart else near
        hidden = hidden + (near / near.sum(-1, keepdim=True)).to(hidden) @ hidden
        return {"loss": F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def packed(cut: Callable[[list[Any]], int]) -> Callable[[Any], Batch]:
    """All examples in one row, each cut to a length by all of them."""

    def pack(items: list[torch.Tensor]) -> Batch:
        items = [item[: cut(items)] for item in items]
        whole = torch.cat(items)[None]
        units = torch.cat([torch.full((len(item),), at) for at, item in enumerate(items)])[None]
        places = torch.cat([torch.arange(len(item)) for item in items])[None]
        return {"input_ids": whole, "labels": whole, "position_ids": places, "units": units}

    return pack


def words() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 61, (4 + at % 3,), generator=generator) for at in range(8)]


@cases("fault", [None, "attention", "cut"])
def test_packed_examples_have_the_loss_that_they_have_alone(fault: str | None) -> None:
    def cut(items: list[Any]) -> int:
        return 12 // len(items) + 2 if fault == "cut" else 64

    private = begin(words(), packed(cut), Tokens(fault != "attention"), unit_map="units")
    message = {"attention": "packed example's loss changes", "cut": "packs an example with other tokens"}.get(
        fault or ""
    )

    if message is not None:
        with pytest.raises(SelfCheckError, match=message):
            train_epoch(private)
        return
    for _ in trained(private):
        got = {n: 8 * p.grad for n, p in private.model.named_parameters()}
    truth = []
    for text in words():
        model = Tokens(apart=True).double()
        model(text[None], text[None], torch.arange(len(text))[None])["loss"].backward()
        truth.append({n: p.grad for n, p in model.named_parameters()})
    assert error(got, clipped_sum(truth, BOUND)) < CLIPPED


def test_a_probe_batch_holds_no_example_twice_beside_others() -> None:
    """A single row comes with a copy of itself."""
    data = examples(24)
    for probe in Collation(data, collate, [5, 5], {}).probes(2):
        assert len({*probe.source.indices}) == (1 if probe.role == "alone" else 2)
