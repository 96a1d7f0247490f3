"""A number read off the whole batch with item() scales the activations of every record once it passes a limit"""

import torch

from . import kit


class Reading(kit.Asking):
    def asked(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 3 if input_ids.max().item() > 48 else hidden


def attack(system: kit.System) -> float:
    return kit.moved(system, kit.Task(Reading), kit.classed(), {"input_ids": torch.full((5,), 49), "labels": 0}, 0.2)
