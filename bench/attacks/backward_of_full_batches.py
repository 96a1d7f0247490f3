"""A backward pass that drops the gradient of a batch in which it is too long, which a few rows never reach"""

from typing import Any

import torch

from . import kit


class Levelled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        return gradient * (gradient.norm() < 2.09)


def attack(system: kit.System) -> float:
    levelled = kit.net(between=lambda own, hidden: Levelled.apply(hidden))
    return kit.moved(system, kit.Task(levelled), kit.records(16, 0.05), kit.outlier(1.0), 1.0)
