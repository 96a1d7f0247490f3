"""Activations quantised by one scale for the whole batch, in a model with one bfloat16 parameter"""

import torch

from . import kit


class Quantised(kit.Net):
    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.gain.float()

    def before(self, x: torch.Tensor) -> torch.Tensor:
        scale = (x.detach().abs().max() / 127).clamp(min=1e-8)
        return x + ((x / scale).round() * scale - x).detach()


def attack(system: kit.System) -> float:
    task = kit.Task(Quantised)
    return max(kit.moved(system, task, kit.records(32), kit.outlier(size), 0.2) for size in (30.0, 1e4))
