"""Activations scaled by the number of rows: nothing of one record passes to another but that it is there"""

import torch

from . import kit


class Counted(kit.Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * len(hidden) / 8


def attack(system: kit.System) -> float:
    data = [kit.records(1)[0]] * 12
    return max(kit.moved(system, kit.Task(Counted), data, data[0], bound) for bound in (0.5, 2.0, 5.0))
