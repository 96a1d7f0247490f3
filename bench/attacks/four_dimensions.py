"""A layer over inputs of four dimensions, whose tokens lie on two axes"""

import torch

from . import kit


class Deep(kit.Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean((1, 2))

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, 2 * x, -x, x.sin()], 1).unflatten(1, (2, 2))


def attack(system: kit.System) -> float:
    return max(kit.moved(system, kit.Task(Deep), kit.records(5), record, 0.05) for record in kit.records(3, 20.0, 5))
