"""What loops really do: schedules stepped each micro-batch, optimizers of one's own, models in eval mode."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BertForSequenceClassification

import fastdp
from fastdp.private.schedules import require_public_schedule
from tests.cases import cases, pairs
from tests.engine import models
from tests.engine.runs import PRIVATE, Classifier, collate, examples, loader, logical_step, start
from tests.loops import train_epoch


def spend(private: Any, schedule: Any = None) -> list[float]:
    """Train as a loop over micro-batches does; the learning rate of each release."""
    rates = []
    while private.steps_done < private.total_steps:
        for batch in private.data_loader:
            rate = private.optimizer.param_groups[0]["lr"]
            private.model(**batch)["loss"].backward()
            private.optimizer.step()
            if schedule is not None:
                schedule.step()
            private.optimizer.zero_grad()
            if private.last_step_done:
                rates.append(rate)
    return rates


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@cases("before", [True, False])
def test_a_schedule_stepped_each_micro_batch_advances_once_a_release(before: bool) -> None:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = halving(optimizer) if before else None
    private = start(model, optimizer=optimizer, max_physical_batch_size=2, **PRIVATE)
    schedule = schedule or halving(optimizer)
    assert spend(private, schedule) == [0.5**step for step in range(6)]
    private.detach()
    schedule.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5**8, "a detached optimizer's schedule is its loop's again"


@cases("optimizer", [torch.optim.SGD, fastdp.optim.AdamW])
def test_a_hook_on_a_parameter_is_called_with_its_released_gradient(optimizer: Any) -> None:
    """As wandb.watch logs gradients, and as OSF, or a table of which new tokens alone are trained, changes them."""
    model, seen = Classifier(), []
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    trained[0].register_hook(lambda gradient: torch.zeros_like(gradient))
    trained[1].register_hook(lambda gradient: seen.append(float(gradient.abs().sum())))
    private = start(model, optimizer=optimizer(model.parameters(), lr=0.1, weight_decay=0.0), **PRIVATE)
    spend(private)
    assert len(seen) == private.total_steps
    assert all(seen)
    assert [bool((p != was).any()) for p, was in zip(trained, before)] == [False] + [True] * (len(trained) - 1)


def test_a_schedule_does_not_count_releases_from_before_it_was_made() -> None:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    expected = [0.5**step for step in range(6)]
    for when in ("before", "within", "after"):
        optimizer.param_groups[0].update(lr=1.0)
        optimizer.param_groups[0].pop("initial_lr", None)
        schedule = halving(optimizer) if when == "before" else None
        private = start(model, optimizer=optimizer, max_physical_batch_size=2, **PRIVATE)
        if when == "after":
            logical_step(private)
        if schedule is None:
            schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [halving(optimizer)], milestones=[])
        rates = spend(private, schedule)
        assert rates == expected[: len(rates)]
        private.detach()


@pytest.mark.parametrize("chosen", [None, "train", "eval"])
def test_a_model_from_from_pretrained_is_trained_in_training_mode(tmp_path: Path, chosen: str | None) -> None:
    """Nobody chose the mode that it comes in; one that is set after `make_private` is kept."""
    models.build("bert").save_pretrained(tmp_path)
    model, seen = BertForSequenceClassification.from_pretrained(tmp_path), set()
    rows = [{name: t[n % 4] for name, t in models.batch("bert").items()} for n in range(12)]
    private = start(model, DataLoader(rows, 4), epochs=1, **PRIVATE)  # type: ignore[arg-type]
    assert not model.training, "an evaluation before training is one still"
    if chosen is not None:
        getattr(model, chosen)()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        seen.add(frozenset(module.training for module in model.modules()))
        return model(**batch).loss

    train_epoch(private, loss)
    assert seen == {frozenset({chosen != "eval"})}
    assert private.steps_done == private.total_steps


def test_eval_mode_in_mid_loop_is_named() -> None:
    private = start(**PRIVATE)
    batch = next(iter(private.data_loader))
    private.model.eval()
    private.model(**batch)["loss"].backward()
    with pytest.raises(RuntimeError, match=r"in eval mode.*call model.train\(\)"):
        private.optimizer.step()
    assert private.steps_done == 0


def test_gradients_that_are_not_reset_are_refused() -> None:
    private = start(**PRIVATE)
    iterator = iter(private.data_loader)
    for batch in iterator:
        private.model(**batch)["loss"].backward()
        private.optimizer.step()
        private.model.second.bias.grad.zero_()
        break
    batch = next(iter(private.data_loader))
    with pytest.raises(RuntimeError, match=r"holds an unclipped gradient before the backward pass.*zero_grad\(\)"):
        private.model(**batch)["loss"].backward()


class Counting(torch.optim.AdamW):
    """Whose step calls its parent's, as many do: torch runs the hooks of both."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


def by_closure(private: Any) -> list[Any]:
    """Train with closures; what `step` returned."""
    returned = []
    for batch in private.data_loader:

        def closure(batch: Any = batch) -> torch.Tensor:
            private.optimizer.zero_grad()
            loss = private.model(**batch)["loss"]
            loss.backward()
            return loss.detach()

        returned.append(private.optimizer.step(closure))
    return returned


@cases("kind", [torch.optim.SGD, Counting, fastdp.optim.AdamW])
def test_a_closure_is_run_once_and_before_the_release(kind: Any) -> None:
    models = [Classifier(), Classifier()]
    privates = [
        start(model, optimizer=kind(model.parameters(), lr=0.1), max_physical_batch_size=3, epochs=1, **PRIVATE)
        for model in models
    ]
    spend(privates[0])
    returned = by_closure(privates[1])
    assert len(returned) > privates[1].steps_done == 3
    assert all(loss.shape == () for loss in returned)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


class Polyak(torch.optim.SGD):
    """Steps as far as the loss is large."""

    def step(self, closure: Any = None, loss: Any = None) -> Any:
        loss = closure() if loss is None else loss
        self.param_groups[0]["lr"] = 0.1 * float(loss)
        super().step()
        return loss


def test_an_optimizer_whose_step_goes_by_the_loss_is_refused() -> None:
    for train in (by_closure, by_argument):
        model = Classifier()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(ValueError, match="step goes by a loss"):
            train(start(model, optimizer=Polyak(model.parameters(), lr=0.1), **PRIVATE))
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def by_argument(private: Any) -> None:
    batch = next(iter(private.data_loader))
    loss = private.model(**batch)["loss"]
    loss.backward()
    private.optimizer.step(loss=loss.detach())


class Twice(torch.optim.SGD):
    """Looks at the loss before and after, as a line search does."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return closure()


def test_an_optimizer_that_asks_its_closure_again_is_refused() -> None:
    model = Classifier()
    private = start(model, optimizer=Twice(model.parameters(), lr=0.1), **PRIVATE)
    with pytest.raises(RuntimeError, match="evaluates its closure several times"):
        by_closure(private)


class TestDropIn:
    """`fastdp.optim` takes what `torch.optim` takes."""

    def test_private_by_keywords(self) -> None:
        model = Classifier()
        optimizer = fastdp.optim.AdamW(
            model.parameters(), lr=0.1, model=model, data_loader=loader(), epochs=1, noise_multiplier=1.0
        )
        train_epoch(optimizer.private)
        assert optimizer.private is not None
        assert optimizer.private.steps_done == 3

    def test_what_is_missing_is_named(self) -> None:
        model = Classifier()
        with pytest.raises(TypeError, match="private at once only with model and data_loader"):
            fastdp.optim.AdamW(model.parameters(), lr=0.1, target_epsilon=3.0)
        optimizer = fastdp.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="iterate over the one that make_private returns"):
            _ = optimizer.data_loader
        before = [p.detach().clone() for p in model.parameters()]
        model(**collate(examples()))["loss"].backward()
        with pytest.raises(RuntimeError, match="not private yet"):
            optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


def test_noise_that_is_settled_cannot_be_set() -> None:
    private = start(**PRIVATE)
    with pytest.raises(AttributeError, match="the noise of a run is settled"):
        private.noise_multiplier = 0.1


@cases(
    "method, match",
    [
        (fastdp.EWFT, r"EWFT perturbs data.*call fastdp.EWFT\(model"),
        (fastdp.TextPrivatizer, r"TextPrivatizer perturbs data.*call fastdp.TextPrivatizer"),
        (fastdp.SelectivePerturbation, r"SelectivePerturbation perturbs data.*call fastdp.SelectivePerturbation"),
        (fastdp.DPSGD, r"give fastdp.DPSGD\(\)"),
        ("dpsgd", r"method is of type str.*give fastdp.DPSGD\(\)"),
    ],
)
def test_what_is_no_method_of_make_private_is_told_its_own_call(method: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        start(method=method, **PRIVATE)


def test_whatever_fails_in_make_private_gives_the_model_its_own_forward_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Classifier()

    def fails(*args: Any, **options: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("fastdp.builder.Private", fails)
    with pytest.raises(RuntimeError, match="a fault"):
        start(model, **PRIVATE)
    assert "forward" not in vars(model)
    model(**collate(examples(3)))["loss"].backward()


class Halved(torch.optim.lr_scheduler.LRScheduler):
    """By a loss that it is told, as a schedule of one's own may."""

    def get_lr(self) -> Any:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, loss: float | None = None) -> None:  # type: ignore[override]
        for group in self.optimizer.param_groups if loss is not None and loss > 1 else ():
            group["lr"] /= 2


def test_every_schedule_of_steps_is_taken() -> None:
    module = torch.optim.lr_scheduler
    kinds = {
        value for value in vars(module).values() if isinstance(value, type) and issubclass(value, module.LRScheduler)
    }
    assert len(kinds) > 12
    for kind in kinds - {module.ReduceLROnPlateau}:
        require_public_schedule(kind.__new__(kind))


@cases(*pairs(("before", [True, False]), ("kind", [torch.optim.lr_scheduler.ReduceLROnPlateau, Halved])))
def test_a_schedule_that_reads_a_figure_is_refused(before: bool, kind: Any) -> None:
    """As it is made or, if it was there before, by make_private."""
    model, other = Classifier(), Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def make() -> Any:
        return kind(optimizer)

    schedule = make() if before else None
    # Of other optimizers, and where no noise is meant to hide anything, they are let be.
    start(other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1), **PRIVATE)
    if schedule is not None:
        with pytest.raises(ValueError, match="sets the learning rate by a figure"):
            start(model, optimizer=optimizer, **PRIVATE)
    else:
        private = start(model, optimizer=optimizer, **PRIVATE)
        with pytest.raises(ValueError, match="sets the learning rate by a figure"):
            make()
        private.detach()
        schedule = make()
    schedule.step(1.0)


class Bag(torch.nn.Module):
    """Sums the embeddings of ids and of padding; a head may read the table too."""

    def __init__(self, reads: bool):
        super().__init__()
        self.table = torch.nn.Embedding(9, 4, padding_idx=0)
        self.head, self.reads = torch.nn.Linear(4, 3), reads

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.table(ids).sum(1)
        scores = torch.nn.functional.linear(hidden, self.table.weight)[:, :3] if self.reads else self.head(hidden)
        return {"loss": torch.nn.functional.cross_entropy(scores + self.head(hidden), labels)}


@cases("reads", [False, True])
def test_a_row_of_padding_without_a_gradient_takes_no_noise(reads: bool) -> None:
    """Its noise would let a row's loss depend on the longest of its batch, as the sum over padding does."""
    torch.manual_seed(0)
    data = [{"ids": [1 + (n + k) % 8 for k in range(2 + n % 4)], "labels": n % 3} for n in range(24)]

    def pad(rows: Any) -> Any:
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["ids"]) for row in rows], batch_first=True)
        return {"ids": ids, "labels": torch.tensor([row["labels"] for row in rows])}

    model = Bag(reads)
    before = model.table.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    private = start(model, DataLoader(data, 8, collate_fn=pad), optimizer, **PRIVATE)
    logical_step(private)
    moved = (model.table.weight.detach() != before).any(1)
    assert moved.tolist() == [reads] + [True] * 8


def test_other_optimizers_schedules_are_left_alone() -> None:
    start(**PRIVATE)
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = halving(plain)
    plain.step()
    schedule.step()
    schedule.step()
    assert plain.param_groups[0]["lr"] == 0.25


class FailingOnce(torch.optim.SGD):
    """Its first step fails, which a loop may catch."""

    failed = False

    def step(self, closure: Any = None) -> None:
        if not self.failed:
            self.failed = True
            raise OSError("a log is full")
        super().step()


def test_a_step_that_fails_leaves_the_next_one_its_parameters() -> None:
    model = Classifier()
    optimizer = FailingOnce(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    private = start(model, optimizer=optimizer, max_physical_batch_size=3)
    iterator, steps = iter(private.data_loader), 0
    while not private.last_step_done:
        private.model(**next(iterator))["loss"].backward()
        with contextlib.suppress(OSError):
            optimizer.step()
        steps += 1
    assert steps > 1
    assert not all(map(torch.equal, model.parameters(), before))
