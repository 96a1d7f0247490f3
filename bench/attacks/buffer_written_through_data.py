"""A buffer written through .data, whose version counter does not move, leaves with the model's state without noise"""

import torch

from . import kit


class Watching(kit.Keeping):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.data.copy_(x.detach().mean(0))
        return x


def attack(system: kit.System) -> float:
    return kit.moved(system, kit.Task(Watching), kit.records(), kit.records(1, 100.0, 5)[0])
