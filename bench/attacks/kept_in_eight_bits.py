"""A function that keeps its input for the backward pass in eight bits with one scale for the batch: forward rows never meet"""

import torch
import torch.nn.functional as F

from . import kit


class Compressed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().max()
        ctx.save_for_backward((x / largest * 127).round() / 127 * largest)
        return F.silu(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.sigmoid() * (1 + x * (1 - x.sigmoid())))


class Model(kit.Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.second(Compressed.apply(self.first(x))), labels)}


def attack(system: kit.System) -> float:
    return max(kit.moved(system, kit.Task(Model), kit.records(24), kit.outlier(size), 0.2) for size in (30.0, 300.0))
