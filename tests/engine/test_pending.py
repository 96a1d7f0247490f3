"""What a loop finds in `.grad` between its backward pass and its step."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from tests.cases import cases
from tests.engine.runs import PRIVATE, Classifier, start


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
