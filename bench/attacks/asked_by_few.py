"""A branch that only batches with a certain token take, and in which records mix: no checked row needs to hold it"""

import torch

from . import kit


class Asking(kit.Asking):
    def asked(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.mean(0) if (input_ids == 49).any() else hidden


def attack(system: kit.System) -> float:
    return kit.moved(system, kit.Task(Asking), kit.classed(), {"input_ids": torch.full((5,), 49), "labels": 0}, 0.2)
