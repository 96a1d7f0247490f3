"""Activations divided by the batch's largest once it passes a limit: the first batch shows nothing, an outlier later does"""

from . import kit


def attack(system: kit.System) -> float:
    limited = kit.net(before=lambda own, x: x / (x.detach().abs().max() / 50).clamp(min=1))
    return kit.moved(system, kit.Task(limited, physical=24), kit.records(47), kit.outlier(1e5), 0.2)
