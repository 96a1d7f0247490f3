"""InstanceNorm1d's running statistics are a mean of the records, and leave with the model's state without noise"""

import torch

from . import kit


def attack(system: kit.System) -> float:
    def normed(own, hidden):
        return own.norm(hidden.view(-1, 4, 4)).flatten(1)

    parts = {"norm": lambda: torch.nn.InstanceNorm1d(4, track_running_stats=True)}
    return kit.moved(system, kit.Task(kit.net(between=normed, parts=parts)), kit.records(), kit.outlier(100.0))
