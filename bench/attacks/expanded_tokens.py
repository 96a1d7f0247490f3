"""Tokens that share memory: one vector expanded over an axis of stride 0"""

import torch

from . import kit


class Expanded(kit.Net):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(1).expand(-1, 64, -1)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.sum(1)


def attack(system: kit.System) -> float:
    return max(kit.moved(system, kit.Task(Expanded), kit.records(5), record, 0.05) for record in kit.records(3, 3.0, 5))
