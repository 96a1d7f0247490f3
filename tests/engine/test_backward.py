"""Backward passes by which rows meet though their forward passes never do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastdp.engine.errors import SelfCheckError
from tests.engine.nets import EXACT, Net, trained
from tests.engine.runs import clipped_sum, collate, error, examples, one_by_one


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


def test_a_backward_pass_that_asks_the_whole_batch_how_much_flows_back_is_taken_row_by_row() -> None:
    engine = trained(backwards(lambda g: g / g.norm() if g.norm() > 1e3 else g), collate(examples(6)))
    assert engine.route == "one-example"
    # Each row's own gradient may be as long as it may.
    assert (
        trained(backwards(lambda g: g * (1e3 / g.norm(dim=1, keepdim=True)).clamp(max=1)), collate(examples(6))).route
        == "uses"
    )


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_a_backward_pass_that_goes_by_the_one_before_is_refused(scale: float) -> None:
    kept = [scale]

    def scaled(gradient: torch.Tensor) -> torch.Tensor:
        size, kept[0] = kept[0], float(gradient.abs().max())
        return gradient * (2 if size > scale else 1)

    with pytest.raises(SelfCheckError, match="from one pass to the next"):
        trained(backwards(scaled), collate(examples(6)))


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
        return gradients[0] * ((largest < 1e4).to(kept) if ctx.switched else kept.cos()), None


@pytest.mark.parametrize("switched", [False, True], ids=["8 bits", "a switch"])
def test_a_backward_pass_that_goes_by_what_was_kept_of_other_rows_is_taken_row_by_row(switched: bool) -> None:
    def net() -> Net:
        return Net(lambda net, h: _Kept.apply(h, switched), before=lambda net, x: x)

    data = collate(examples(6))
    engine = trained(net(), data)
    assert engine.route == "one-example"
    assert error(engine.accumulator.sums, clipped_sum(one_by_one(net(), data), 0.5)) < EXACT
