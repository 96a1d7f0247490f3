"""InstanceNorm1d's running statistics are a mean of the records, and leave with the model's state without noise"""

import torch
from torch import nn

from . import kit


class Normed(kit.Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden.view(-1, 4, 4)).flatten(1)


def attack(system: kit.System) -> float:
    return kit.moved(system, kit.Task(Normed), kit.records(), kit.outlier(100.0))
