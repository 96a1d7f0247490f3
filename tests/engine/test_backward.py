"""Backward passes by which rows meet though their forward passes never do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.cases import cases
from tests.engine.nets import EXACT, Net, exact_batches, gap, trained
from tests.engine.reference import assert_exact_step
from tests.engine.runs import collate, examples, one_by_one


class _Back(torch.autograd.Function):
    """Nothing forward, and a function of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, back: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.back = back
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back(gradients[0]), None


def backwards(back: Callable[[torch.Tensor], torch.Tensor]) -> Net:
    return Net(lambda net, h: _Back.apply(h, back))  # type: ignore[no-any-return]


@cases("name", ["batch", "row"])
def test_a_backward_pass_that_divides_by_the_gradients_of_the_batch_is_taken_row_by_row(name: str) -> None:
    back = {"batch": lambda g: g / g.norm(), "row": lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=1e-12)}[name]
    assert_exact_step(backwards(back), collate(examples(6)), route="one-example" if name == "batch" else "uses")


class _Kept(torch.autograd.Function):
    """Goes straight in its forward pass, and back by what it kept of all rows: 8 bits with one scale, or whether one is large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, switched: bool) -> torch.Tensor:
        ctx.switched, largest = switched, x.abs().max()
        ctx.save_for_backward((x / largest * 127).round() / 127 * largest, largest)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kept, largest = ctx.saved_tensors
        return gradients[0] * ((largest < 50).to(kept) if ctx.switched else kept.cos()), None


class Keeping(Net):
    """Keeps what its first layer gives, which may be large."""

    switched = False

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": F.cross_entropy(self.second(_Kept.apply(self.first(x), self.switched)), labels)}


class Switched(Keeping):
    switched = True


@cases("kind", [Keeping, Switched])
def test_a_backward_pass_that_goes_by_what_was_kept_of_other_rows_is_taken_row_by_row(kind: type[Keeping]) -> None:
    """The first batch holds nothing large."""
    large = {"x": torch.full((5,), 300.0), "labels": 0}
    exact_batches(kind, [collate(examples(6)), collate([*examples(6), large])], route="one-example")


@cases("alone", [False, True])
def test_hooks_of_the_user_see_no_gradient_of_single_rows(alone: bool) -> None:
    def made() -> Net:
        return backwards(lambda g: g / g.norm() if alone else g)

    data, model, seen = collate(examples(6)), made(), []
    for p in model.parameters():
        p.register_hook(lambda gradient: seen.append(gradient.norm()))
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    model.second.register_full_backward_hook(lambda module, given, made: print(made[0].norm(), given[0].norm()))
    engine = trained(model, data)
    assert engine.route == ("one-example" if alone else "uses")
    assert gap(engine, one_by_one(made(), data)) < EXACT
    assert not seen
    model.eval()(**data)["loss"].backward()
    assert len(seen) == 8
