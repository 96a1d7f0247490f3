"""A buffer that counts the rows it has seen, and so leaves with the model how many records a batch had"""

import torch

from . import kit


class Model(kit.Net):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return x


def attack(system: kit.System) -> float:
    return kit.moved(system, kit.Task(Model), kit.records(16), kit.records(1, 1.0, 5)[0])
