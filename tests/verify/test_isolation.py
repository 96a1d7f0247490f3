"""The isolated mode: each example is collated and run alone, so that no other can reach it in the model or the collator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from tests.cases import cases
from tests.engine.models import build
from tests.engine.runs import (
    CLASSES,
    CLIPPED,
    FEATURES,
    PRIVATE,
    Batch,
    Classifier,
    clipped_sum,
    collate,
    error,
    examples,
    loader,
    one_by_one,
    start,
)
from tests.loops import Loss, own_loss, trained
from tests.private.ranked import padded, texts

ALONE: dict[str, Any] = {"isolation": "per_example", "method": fastdp.DPSGD(max_grad_norm=0.5)}
USERS: dict[str, Any] = {"user_ids": [index // 3 for index in range(24)], "max_examples_per_user": 3}
MEAN: dict[str, Any] = {"loss_reduction": "mean"}


def stepped(private: Any, loss: Loss = own_loss, steps: int = 1) -> tuple[list[dict[str, torch.Tensor]], list[Batch]]:
    """The sums that were released in the first steps, and the batches of the last of them."""
    size, found, batches = private.data_loader.batch_size, [], []
    private.optimizer.zero_grad()
    while len(found) < steps:
        for batch in trained(private, loss=loss):
            batches.append(batch)
            if private.last_step_done:
                named = private.model.named_parameters()
                found.append({n: size * p.grad.double() for n, p in named if p.grad is not None})
                if len(found) == steps:
                    break
                batches = []
    return found, batches


def require_sum(got: dict[str, torch.Tensor], model: nn.Module, batches: Sequence[Batch], bound: float = 0.5) -> None:
    """Assert that it is the sum over batches, of one unit each, of the clipped gradients of their rows by autograd."""
    units = [one_by_one(model, batch) for batch in batches]
    assert error(got, clipped_sum([{n: sum(g[n] for g in rows) for n in rows[0]} for rows in units], bound)) < CLIPPED


class Centred(Classifier):
    """Subtracts a running mean, which every forward moves: a buffer that is not saved."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES), persistent=False)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(0.5 * x.mean(0))
        return super().logits(x - self.mean)


class Running(Centred):
    """The same, saved with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))


# Exact sums.


@cases("make", [lambda: build("gpt2"), Centred, Running, Classifier])
def test_sums_are_autograd_s(make: Callable[[], nn.Module]) -> None:
    model = make()
    words = not isinstance(model, Classifier)
    private = start(model, loader(texts(12), 6, collate_fn=padded) if words else loader(), **ALONE)
    state = copy.deepcopy(model.state_dict())
    (got,), batches = stepped(private)
    assert private.route == "one-example"
    assert all(len(next(iter(batch.values()))) == 1 for batch in batches)
    require_sum(got, model, batches)
    # The rate is 0, so that only a buffer could have changed.
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def outside(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"])["logits"], batch["labels"])


def by_row(output: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(output["logits"], batch["labels"], reduction="none")


@cases(
    "options, loss, rows",
    [
        (MEAN, outside, 1),
        ({"criterion": by_row}, None, 1),
        # A user's examples come together, and their gradients are added up before they are clipped.
        (USERS, own_loss, 3),
        ({**USERS, **MEAN}, outside, 3),
    ],
)
def test_losses_outside_of_the_model_and_users(options: dict[str, Any], loss: Loss | None, rows: int) -> None:
    private = start(data_loader=loader(batch_size=8 // rows), **options, **ALONE)
    (got,), batches = stepped(private, loss or (lambda model, batch: private.loss(model(batch["x"]), batch)))
    assert all(len(batch["labels"]) == rows for batch in batches)
    require_sum(got, Classifier(), batches)


LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "time first": (lambda o: o.transpose(0, 1), lambda o: o.transpose(0, 1)),
    "flat": (lambda o: o.flatten(0, 1), lambda o: o.unflatten(0, (-1, FEATURES))),
    "last": (lambda o: o.permute(1, 2, 0), lambda o: o.permute(2, 0, 1)),
}


class Tagger(nn.Module):
    """Logits for each of a row's entries, in the order that ``arrange`` gives them."""

    def __init__(self, place: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, (self.arrange, self.restore) = nn.Linear(1, CLASSES), LAYOUTS[place]

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.arrange(self.head(x.unsqueeze(-1)))
        return logits if labels is None else {"loss": self.loss(logits, labels)}

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = labels.unsqueeze(1).expand(-1, FEATURES)
        return F.cross_entropy(self.restore(logits).transpose(1, 2), labels, reduction="none").mean(1).mean()


@cases("place", LAYOUTS)
def test_outputs_of_users_whose_rows_are_not_first(place: str) -> None:
    """A loop reads the outputs of all rows of a user as the model lays them out."""
    private = start(Tagger(place), loader(batch_size=3), **MEAN, **USERS, **ALONE)
    (got,), batches = stepped(private, lambda own, batch: own.loss(own(batch["x"]), batch["labels"]))
    require_sum(got, Tagger(place), batches)


def test_empty_draws_release_noise_alone() -> None:
    """With dropout in the model; at a rate of 1/24 a third of all draws are empty."""
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.3), nn.Linear(8, CLASSES))
    private = start(model, loader(batch_size=1), epochs=1, **MEAN, **ALONE)
    sums, _ = stepped(private, lambda own, batch: F.cross_entropy(own(batch["x"]), batch["labels"]), steps=24)
    assert 0 < sum(not any(bool(total.any()) for total in own.values()) for own in sums) < 24


def test_a_non_finite_example_is_left_out() -> None:
    data = examples(8)
    data[3] = {"x": torch.full((FEATURES,), torch.nan), "labels": 0}
    private = start(data_loader=loader(data), epochs=1, **ALONE)
    (got,), batches = stepped(private)
    kept = [batch for batch in batches if torch.isfinite(batch["x"]).all()]
    assert len(kept) == len(batches) - 1 == 7
    require_sum(got, private.model, kept)
    assert private.nonfinite_examples == 1


@cases("options, said", [(ALONE, 1), ({**ALONE, **USERS}, 1), ({}, 0)])
def test_the_card_says_by_construction(options: dict[str, Any], said: int) -> None:
    """Of users too, whose examples are collated together."""
    private = start(data_loader=loader(batch_size=4), **options, **PRIVATE)
    stepped(private)
    assumed = " ".join(private.card()["assumptions"])
    assert assumed.count("units are independent by construction") == said
    assert assumed.count("was verified on the first batch") == 1 - said


# Code that couples examples moves a release by one bound at most.


class Contrast(Classifier):
    """Scores each example against the others of its batch."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.logits(x)
        return {"loss": F.cross_entropy(logits @ logits.T, torch.arange(len(x))) + F.cross_entropy(logits, labels)}


def mixed(items: Sequence[Mapping[str, Any]]) -> Batch:
    batch = collate(items)
    return {**batch, "x": 0.6 * batch["x"] + 0.4 * batch["x"].roll(1, 0)}


def hang(model: nn.Module, step: int) -> None:
    if step == 1:
        model.first.register_forward_pre_hook(lambda module, args: (args[0] + args[0].mean(0),))


@pytest.mark.parametrize(
    ("make", "collator", "change"),
    [(Contrast, collate, None), (Running, collate, None), (Classifier, mixed, None), (Classifier, collate, hang)],
)
@pytest.mark.parametrize("size", [0.3, 1e4])
def test_coupled_examples_are_run_apart(
    make: Callable[[], nn.Module], collator: Any, change: Callable[[nn.Module, int], None] | None, size: float
) -> None:
    def released(data: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
        model = make()
        # Every example is in every step, and the rate is 0.
        private = start(model, loader(data, len(data), collate_fn=collator), epochs=3, isolation="per_example")
        found = []
        for step in range(3):
            if change is not None:
                change(model, step)
            found += stepped(private)[0]
        assert all(not bool(buffer.any()) for buffer in model.buffers())
        return found

    data = examples(8)
    outlier = {"x": torch.full((FEATURES,), size), "labels": 0}
    for more, less in zip(released([outlier, *data]), released(data), strict=True):
        gap = torch.stack([(more[name] - own).norm() for name, own in less.items()]).norm()
        assert float(gap) < 1 + CLIPPED
