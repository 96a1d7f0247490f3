"""What a loop finds in `.grad` between its backward pass and its step."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import fastdp
from fastdp.calls.errors import SelfCheckError
from tests.cases import cases
from tests.engine.runs import CLIPPED, EXACT, PRIVATE, Classifier, Odd, error, loader, logical_step, same, start, state


def clip(model: torch.nn.Module) -> float:
    """By the name that was imported before any run was private."""
    return float(clip_grad_norm_(model.parameters(), 1.0))


def halve(model: torch.nn.Module) -> float:
    """As some loops do by hand."""
    for parameter in model.parameters():
        parameter.grad *= 0.5
        parameter.grad[:1] = 0
        parameter.grad.data.clamp_(-1, 1)
    return 0.0


def norm_of_rows(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    found = torch.linalg.vector_norm(gradient, 2, 1)
    assert found.shape == gradient.shape[:1]
    return found


#: What loops do with gradients before a step, and what they find.
HABITS: dict[str, Callable[[torch.nn.Module], float]] = {
    "clip_grad_norm_": clip,
    "norms": lambda model: sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5,
    "data": lambda model: float(torch.stack([p.grad.data.abs().max() for p in model.parameters()]).max()),
    "total": lambda model: float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])),
    "finite": lambda model: float(not all(torch.isfinite(p.grad).all() for p in model.parameters())),
    "arithmetic": lambda model: max(float((2 * p.grad - p.grad**2).sum()) for p in model.parameters()),
    "rows": lambda model: float(sum(norm_of_rows(p.grad).sum() for p in model.parameters() if p.dim() == 2)),
    "by_hand": halve,
}


@cases("habit", HABITS)
def test_gradients_read_as_zeros_before_the_step_and_a_loop_is_told_once(habit: str) -> None:
    private = start(**PRIVATE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in private.data_loader:
            private.model(**batch)["loss"].backward()
            assert HABITS[habit](private.model) == 0
            assert all(p.grad is not None for p in private.model.parameters())
            private.optimizer.step()
            assert any(p.grad is None or p.grad.norm() > 0 for p in private.model.parameters())
            private.optimizer.zero_grad()
    (said,) = [entry for entry in caught if "Gradients" in str(entry.message)]
    assert "clip_grad_norm_ has no effect" in str(said.message)
    assert said.filename == __file__
    assert private.steps_done == 3


def test_pending_gradients_take_no_memory() -> None:
    private = start(**PRIVATE)
    for batch in private.data_loader:
        private.model(**batch)["loss"].backward()
        for parameter in private.model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.shape == parameter.shape
            assert parameter.grad.untyped_storage().nbytes() == parameter.element_size()
        private.optimizer.step()
        private.optimizer.zero_grad()
    private.detach()
    assert all(parameter.grad is None for parameter in private.model.parameters())


def test_a_scaler_of_a_loss_outside_the_model_is_refused() -> None:
    model = torch.nn.Linear(5, 3)
    private = start(model, loss_reduction="mean", **PRIVATE)
    scaler = torch.amp.GradScaler("cpu")
    batch = next(iter(private.data_loader))
    loss = torch.nn.functional.cross_entropy(private.model(batch["x"]), batch["labels"])
    scaler.scale(loss).backward()
    with pytest.raises(ValueError, match=r"GradScaler\(enabled=False\)"):
        scaler.step(private.optimizer)


@cases("private", [True, False])
def test_other_clipping_is_left_alone(private: bool) -> None:
    run = start(**PRIVATE)
    plain = Classifier()
    if not private:
        run.detach()
        plain = run.model  # type: ignore[assignment]
    plain(torch.ones(2, 5), torch.zeros(2, dtype=torch.int64))["loss"].backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clip(plain) > 0
        plain.zero_grad()
        assert clip(plain) == 0


def penalty(model: Any) -> torch.Tensor:
    return sum(0.1 * p.square().sum() + 0.03 * p.abs().sum() for p in model.parameters())


def penalized_step(private: Any, factor: float, batches: Any = None) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The gradients of one release, whose loss has a penalty and is scaled, and its batches without those of probes."""
    seen = []
    for batch in private.data_loader if batches is None else batches:
        if not any(same(batch, own) for own in seen):
            seen.append(batch)
        (factor * (private.model(**batch)["loss"] + penalty(private.model))).backward()
        private.optimizer.step()
        if private.last_step_done:
            break
    gradients = {name: p.grad.clone() for name, p in private.model.named_parameters()}
    private.optimizer.zero_grad()
    return gradients, seen


@pytest.mark.parametrize("model", [Classifier, Odd])
@pytest.mark.parametrize(("microbatch", "factor"), [(None, 1.0), (3, 0.25)])
def test_a_penalty_of_weights_is_added_as_it_is(model: Any, microbatch: int | None, factor: float) -> None:
    options = {"max_physical_batch_size": microbatch, "method": fastdp.DPSGD(max_grad_norm=0.5)}
    private, plain = (start(model(), **options) for _ in range(2))
    for _ in range(2):
        gradients, _ = penalized_step(private, factor)
        alone, _ = logical_step(plain)
        weights = dict(private.model.named_parameters())
        own = dict(zip(weights, torch.autograd.grad(penalty(private.model), list(weights.values()))))
        assert error(gradients, {name: alone[name] + own[name] for name in own}) < EXACT
    assert any("directly" in sentence for sentence in private.card()["assumptions"])
    assert not any("directly" in sentence for sentence in plain.card()["assumptions"])


def test_an_optimizer_with_a_step_of_its_own_adds_the_penalty() -> None:
    moved = []
    for kind in (fastdp.optim.AdamW, torch.optim.AdamW):
        model = Classifier()
        private = start(model, optimizer=kind(model.parameters(), lr=0.1))
        for _ in range(2):
            penalized_step(private, 1.0)
        moved.append(state(model))
    assert error(*moved) < CLIPPED


LEAKS = {
    "a head": lambda model, batch: F.cross_entropy(F.linear(batch["x"], model.first.weight), batch["labels"]),
    "a factor of the loss": lambda model, batch: model(**batch)["loss"].detach() * penalty(model),
    "a factor of the batch": lambda model, batch: penalty(model) / len(batch["x"]),
    "a bias": lambda model, batch: (model.first.bias * batch["x"].mean()).sum(),
}


@pytest.mark.parametrize("term", LEAKS.values(), ids=LEAKS)
@pytest.mark.parametrize("microbatch", [None, 3])
def test_what_weights_get_directly_of_the_data_is_not_released(term: Any, microbatch: int | None) -> None:
    private = start(max_physical_batch_size=microbatch, **PRIVATE)
    before = state(private.model)

    # Reads the same weights without the private model's forward pass.
    twin = Classifier()
    twin.first._parameters, twin.second._parameters = private.model.first._parameters, private.model.second._parameters

    def train() -> None:
        for batch in private.data_loader:
            (private.model(**batch)["loss"] + term(twin, batch)).backward()
            private.optimizer.step()

    with pytest.raises(SelfCheckError, match=r"inside forward\(\)"):
        train()
    # A loop that catches the refusal releases nothing of this batch.
    with contextlib.suppress(RuntimeError):
        private.optimizer.step()
    assert private.steps_done == 0
    assert same(before, state(private.model))


@pytest.mark.parametrize("options", [{"isolation": "per_example"}, {"self_check": False}])
def test_a_penalty_that_nothing_can_verify_is_refused(options: Any) -> None:
    private = start(**options, **PRIVATE)
    with pytest.raises(RuntimeError, match="weight_decay"):
        penalized_step(private, 1.0)
    assert private.steps_done == 0


def test_a_gradient_that_was_not_reset_is_no_penalty() -> None:
    private = start()
    penalized_step(private, 1.0)
    batch = next(iter(private.data_loader))
    private.model.first.bias.grad = torch.ones_like(private.model.first.bias)
    with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
        (private.model(**batch)["loss"] + penalty(private.model)).backward()


def test_a_penalty_of_a_first_batch_without_examples_is_verified() -> None:
    private = start(data_loader=loader(batch_size=1), max_physical_batch_size=1, epochs=1, **PRIVATE)
    made = 0
    while made < 3:
        gradients, _ = penalized_step(private, 1.0)
        made += bool(gradients)
    assert private.steps_done == 3
