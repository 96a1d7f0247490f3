"""A function whose forward keeps records apart and whose backward divides by the norm of all their gradients"""

import torch

from . import kit


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm().clamp(min=1e-12)


def attack(system: kit.System) -> float:
    task = kit.Task(kit.net(between=lambda own, hidden: Normalised.apply(hidden)))
    extra = {"x": torch.full((kit.FEATURES,), 0.1), "labels": 0}
    return max(kit.moved(system, task, kit.records(n), extra, bound) for n in (1, 2, 24) for bound in (0.2, 5.0))
