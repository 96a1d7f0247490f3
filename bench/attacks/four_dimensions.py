"""A layer over inputs of four dimensions, whose tokens lie on two axes"""

import torch

from . import kit


def attack(system: kit.System) -> float:
    deep = kit.net(
        before=lambda own, x: torch.stack([x, 2 * x, -x, x.sin()], 1).unflatten(1, (2, 2)),
        between=lambda own, hidden: hidden.mean((1, 2)),
    )
    return max(kit.moved(system, kit.Task(deep), kit.records(5), record, 0.05) for record in kit.records(3, 20.0, 5))
