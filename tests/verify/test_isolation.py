"""The isolated mode: each example is collated and run alone, so that no other can reach it in the model or the collator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fastdp
from tests.cases import cases
from tests.engine.models import build
from tests.engine.runs import CLASSES, FEATURES, Batch, Classifier, collate, error, examples, loader, start

ALONE = {"isolation": "per_example"}
CLIPPED = 1e-4
Loss = Callable[[nn.Module, Batch], torch.Tensor]


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    output = model(**batch)
    return output["loss"] if isinstance(output, Mapping) else output.loss


def stepped(private: Any, loss: Loss = own_loss, steps: int = 1) -> tuple[list[dict[str, torch.Tensor]], list[Batch]]:
    """The sums that were released in the first steps, and the batches of the last of them."""
    size, found, batches = private.data_loader.batch_size, [], []
    while len(found) < steps:
        for batch in private.data_loader:
            batches = batches if len(batches) and not private.last_step_done else []
            batches.append(copy.deepcopy(batch))
            private.optimizer.zero_grad()
            loss(private.model, batch).backward()
            private.optimizer.step()
            if private.last_step_done:
                named = private.model.named_parameters()
                found.append({n: size * p.grad.double() for n, p in named if p.grad is not None})
                if len(found) == steps:
                    break
    return found, batches


def by_autograd(
    model: nn.Module, batches: Sequence[Batch], bound: float, loss: Loss = own_loss
) -> dict[str, torch.Tensor]:
    """The sum over batches, of one unit each, of the gradients of its rows, scaled to norm ``bound`` at most; float64."""
    model = copy.deepcopy(model).double()
    vars(model).pop("forward", None)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    parameters = dict(model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for batch in batches:
        own = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for row in range(len(next(iter(batch.values())))):
            single = {k: v[row : row + 1] for k, v in batch.items()}
            single = {k: v.double() if v.is_floating_point() else v for k, v in single.items()}
            gradients = torch.autograd.grad(loss(model, single), list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, gradients):
                own[name] += 0 if gradient is None else gradient
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        size = torch.stack([g.norm() for g in own.values()]).norm()
        for name, gradient in own.items():
            total[name] += gradient * (bound / size).clamp(max=1)
    return total


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


def sentences(count: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 20, (4 + index % 5,), generator=generator) for index in range(count)]


def padded(items: Sequence[torch.Tensor]) -> Batch:
    ids = nn.utils.rnn.pad_sequence(list(items), batch_first=True)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


# Exact sums.


@cases("make", [lambda: build("gpt2"), Centred, Running, Classifier])
def test_sums_are_autograd_s(make: Callable[[], nn.Module]) -> None:
    model = make()
    words = not isinstance(model, Classifier)
    data = loader(sentences(), 6, collate_fn=padded) if words else loader()
    private = start(model, data, method=fastdp.DPSGD(max_grad_norm=0.5), **ALONE)
    state = copy.deepcopy(model.state_dict())
    (got,), batches = stepped(private)
    assert private.route == "one-example"
    assert all(len(next(iter(batch.values()))) == 1 for batch in batches)
    assert error(got, by_autograd(model, batches, 0.5)) < CLIPPED
    # The rate is 0, so that only a buffer could have changed.
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("how", ["criterion", "loss_reduction"])
def test_a_loss_outside_of_the_model(how: str) -> None:
    def own(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"])["logits"], batch["labels"])

    def rows(output: Any, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(output["logits"], batch["labels"], reduction="none")

    options: dict[str, Any] = {"criterion": rows} if how == "criterion" else {"loss_reduction": "mean"}
    private = start(method=fastdp.DPSGD(max_grad_norm=0.5), **options, **ALONE)
    asked = (lambda model, batch: private.loss(model(batch["x"]), batch)) if how == "criterion" else own
    (got,), batches = stepped(private, asked)
    assert error(got, by_autograd(private.model, batches, 0.5, own)) < CLIPPED


@pytest.mark.parametrize("outside", [False, True])
def test_users_with_several_examples(outside: bool) -> None:
    """A user's examples come together, and their gradients are added up before they are clipped."""
    users = [index // 3 for index in range(24)]
    options: dict[str, Any] = {"loss_reduction": "mean"} if outside else {}
    private = start(
        data_loader=loader(batch_size=3),
        user_ids=users,
        max_examples_per_user=3,
        method=fastdp.DPSGD(max_grad_norm=0.5),
        **options,
        **ALONE,
    )

    def own(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"])["logits"], batch["labels"])

    (got,), batches = stepped(private, own if outside else own_loss)
    assert all(len(batch["labels"]) == 3 for batch in batches)
    assert error(got, by_autograd(private.model, batches, 0.5, own)) < CLIPPED


class Tagger(nn.Module):
    """Logits for each of a row's entries, in the order that ``arrange`` gives them."""

    def __init__(self, arrange: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.head, self.arrange = nn.Linear(1, CLASSES), arrange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.arrange(self.head(x.unsqueeze(-1)))


@pytest.mark.parametrize("place", ["time first", "flat", "last"])
def test_outputs_of_users_whose_rows_are_not_first(place: str) -> None:
    """A criterion reads the outputs of all rows of a user as the model lays them out."""
    arrange, restore = {
        "time first": (lambda o: o.transpose(0, 1), lambda o: o.transpose(0, 1)),
        "flat": (lambda o: o.flatten(0, 1), lambda o: o.unflatten(0, (-1, FEATURES))),
        "last": (lambda o: o.permute(1, 2, 0), lambda o: o.permute(2, 0, 1)),
    }[place]

    def own(model: nn.Module, batch: Batch) -> torch.Tensor:
        rows = restore(model(batch["x"])).transpose(1, 2)
        labels = batch["labels"].unsqueeze(1).expand(-1, FEATURES)
        return F.cross_entropy(rows, labels, reduction="none").mean(1).mean()

    users = {"user_ids": [index // 3 for index in range(24)], "max_examples_per_user": 3}
    method = fastdp.DPSGD(max_grad_norm=0.5)
    private = start(Tagger(arrange), loader(batch_size=3), method=method, loss_reduction="mean", **users, **ALONE)
    (got,), batches = stepped(private, own)
    assert error(got, by_autograd(private.model, batches, 0.5, own)) < CLIPPED


def test_dropout_and_noise() -> None:
    """With noise the release moves, and the run spends what it states."""
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.3), nn.Linear(8, CLASSES))
    private = start(model, noise_multiplier=1.0, target_delta=1e-3, loss_reduction="mean", unsafe_seed=None, **ALONE)
    stepped(private, lambda own, batch: F.cross_entropy(own(batch["x"]), batch["labels"]), steps=3)
    assert private.steps_done == 3
    assert 0 < private.epsilon() < float("inf")


def test_empty_draws_release_noise_alone() -> None:
    private = start(data_loader=loader(batch_size=1), epochs=1, **ALONE)
    empty = 0
    for batch in private.data_loader:
        private.optimizer.zero_grad()
        own_loss(private.model, batch).backward()
        private.optimizer.step()
        if private.last_step_done:
            sums = [p.grad for p in private.model.parameters() if p.grad is not None]
            empty += all(not bool(grad.any()) for grad in sums)
    assert private.steps_done == 24
    assert empty > 0, "at a rate of 1/24 a third of all draws are empty"


def test_a_non_finite_example_is_left_out() -> None:
    data = examples(8)
    data[3] = {"x": torch.full((FEATURES,), torch.nan), "labels": 0}
    private = start(data_loader=loader(data), epochs=1, **ALONE)
    (got,), batches = stepped(private)
    kept = [batch for batch in batches if torch.isfinite(batch["x"]).all()]
    assert len(kept) == len(batches) - 1 == 7
    assert error(got, by_autograd(private.model, kept, 1.0)) < CLIPPED
    assert private.nonfinite_examples == 1


def test_the_card_says_by_construction() -> None:
    """Of users too, whose examples are collated together."""
    sentence = "units are independent by construction"
    users: dict[str, Any] = {"user_ids": [i // 2 for i in range(24)], "max_examples_per_user": 2}
    for options, said in ((ALONE, 1), ({**ALONE, **users}, 1), ({}, 0)):
        private = start(noise_multiplier=1.0, target_delta=1e-3, **options)
        stepped(private)
        assumptions = [own for own in private.card()["assumptions"] if sentence in own]
        assert len(assumptions) == said
        private.detach()


@cases(
    ("options", "match"),
    [
        ({"isolation": "per_row"}, "isolation is 'per_row': use 'per_example'"),
        ({"isolation": True}, "isolation is True: use 'per_example'"),
        ({"unit_map": "units", **ALONE}, "leave unit_map and capture out"),
    ],
)
def test_bad_input(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        start(**options)


# Code that couples examples moves a release by one bound at most.


class Normalised(Classifier):
    """By the batch's own statistics."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return super().logits(x - x.mean(0) / 2)


class Contrast(Classifier):
    """Scores each example against the others of its batch."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.logits(x)
        return {"loss": F.cross_entropy(logits @ logits.T, torch.arange(len(x))) + F.cross_entropy(logits, labels)}


class Late(Classifier):
    """Mixes examples once a switch is set."""

    late = False

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return super().logits(x + x.mean(0) if self.late else x)


def mixed(items: Sequence[Mapping[str, Any]]) -> Batch:
    batch = collate(items)
    return {**batch, "x": 0.6 * batch["x"] + 0.4 * batch["x"].roll(1, 0)}


def open_branch(model: nn.Module, step: int) -> None:
    model.late = step > 0  # type: ignore[assignment]


def hang(model: nn.Module, step: int) -> None:
    if step == 1:
        model.first.register_forward_pre_hook(lambda module, args: (args[0] + args[0].mean(0),))


@pytest.mark.parametrize(
    ("make", "collator", "change"),
    [
        (Normalised, collate, None),
        (Contrast, collate, None),
        (Running, collate, None),
        (Classifier, mixed, None),
        (Late, collate, open_branch),
        (Classifier, collate, hang),
    ],
)
@pytest.mark.parametrize("size", [0.3, 30.0, 1e4])
def test_coupled_examples_are_run_apart(
    make: Callable[[], nn.Module], collator: Any, change: Callable[[nn.Module, int], None] | None, size: float
) -> None:
    def released(data: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
        model = make()
        # Every example is in every step, and the rate is 0.
        private = start(model, DataLoader(data, len(data), collate_fn=collator), epochs=3, **ALONE)  # type: ignore[arg-type]
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
