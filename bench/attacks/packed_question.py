"""A branch that only packed batches with a certain token take, and in which records mix: the first batch held none"""

import torch

from . import kit, systems


class Asking(kit.Next):
    def between(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.mean(1, keepdim=True).detach() if (input_ids == 49).any() else hidden


def attack(system: systems.FastDP) -> float:
    task = kit.Task(Asking, collate=kit.packed, physical=3, options={"unit_map": "units"})
    record = {"input_ids": torch.full((5,), 49)}
    return kit.moved(system, task, kit.tokens(40, [5], 49), record, 0.2)
