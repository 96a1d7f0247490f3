"""A loss that the user multiplies before backward(), by a number that the batch decides"""

import torch

from . import kit


class Scaled(kit.Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor):
        output = super().forward(x, labels)
        return {**output, "loss": output["loss"] * 1e-3 * x.detach().square().sum()}


def attack(system: kit.System) -> float:
    return kit.moved(system, kit.Task(Scaled), kit.records(12, 0.5), kit.records(1, 1e3, 5)[0], 0.3)
