"""Which tensors a loss is a weighted sum of, as autograd's graph tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastdp.calls.autograd import graph_of, summands

#: What is made of a tensor of three rows, and whether it is a sum of them.
LOSSES: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    "a mean": (lambda t: t.mean(), True),
    "one by one": (lambda t: sum(t), True),
    "weighted": (lambda t: (t * torch.arange(3.0)).sum() / 3, True),
    "a product": (lambda t: t @ torch.ones(3), True),
    "stacked": (lambda t: torch.stack([t, 2 * t]).mean(1).sum(), True),
    "squared": (lambda t: t.mean() ** 2, False),
    "by itself": (lambda t: t @ t, False),
    "a divisor": (lambda t: 1 / t.sum(), False),
    "the largest": (lambda t: t.max(), False),
    "beside a weight": (lambda t: t.sum() + torch.ones(3, requires_grad=True).sum(), False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_tensors_that_a_loss_sums(name: str) -> None:
    make, sums = LOSSES[name]
    t = torch.rand(3, requires_grad=True).exp()
    found = summands(make(t), {(t.grad_fn, t.output_nr): t}, [])
    assert [*map(id, found)] == [id(t)] * sums


def test_leaves_may_stand_beside_them() -> None:
    t, leaf = torch.rand(3, requires_grad=True).exp(), torch.rand((), requires_grad=True)
    total = t.mean() + 2 * leaf
    assert summands(total, {(t.grad_fn, 0): t}, [leaf])[0] is t
    assert len({*graph_of(total)}) == len([*graph_of(total)])


def test_of_tensors_that_follow_from_one_another_the_last_is_taken() -> None:
    """As in a normalizing flow, whose scales are part of the loss and of what comes behind them."""
    t = torch.rand(3, requires_grad=True).tanh()
    z = t.exp() + 1
    losses = 0.5 * z - t
    found = summands(losses.mean(), {(own.grad_fn, own.output_nr): own for own in (t, z, losses)}, [])
    assert [*map(id, found)] == [id(losses)]
