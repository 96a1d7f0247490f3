"""Dropout by a generator of the model's own with a seed that is known: one record more moves the masks of all behind it"""

import torch

from . import kit


class Model(kit.Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2 * torch.empty_like(hidden).bernoulli_(0.5, generator=self.generator)


def attack(system: kit.System) -> float:
    return kit.moved(system, kit.Task(Model), kit.records(24), kit.records(1, 1.0, 5)[0], 0.2, first=True)
