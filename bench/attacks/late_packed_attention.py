"""Packed rows whose records see each other once a row is long: the first batch, which was checked, held none so long"""

import torch

from . import kit, systems


class Leaking(kit.Next):
    def between(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.cumsum(1).detach() if input_ids.shape[1] > 12 else hidden


def attack(system: systems.FastDP) -> float:
    task = kit.Task(Leaking, collate=kit.packed, physical=3, options={"unit_map": "units"})
    others = kit.tokens(3, [4]) + kit.tokens(5, [9], seed=2)
    return kit.moved(system, task, others, kit.tokens(1, [9], seed=3)[0], 0.05, first=True)
