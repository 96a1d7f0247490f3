"""Activations divided by the batch's largest once it passes a limit: the first batch shows nothing, an outlier later does"""

import torch

from . import kit


class Limited(kit.Net):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.detach().abs().max() / 50).clamp(min=1)


def attack(system: kit.System) -> float:
    task = kit.Task(Limited, physical=24)
    plain = kit.records(47)
    return kit.moved(system, task, plain, kit.records(1, 1e5, 5)[0], 0.2)
