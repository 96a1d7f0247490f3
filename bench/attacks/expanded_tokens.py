"""Tokens that share memory: one vector expanded over an axis of stride 0"""

from . import kit


def attack(system: kit.System) -> float:
    expanded = kit.net(
        before=lambda own, x: x.unsqueeze(1).expand(-1, 64, -1), between=lambda own, hidden: hidden.sum(1)
    )
    return max(kit.moved(system, kit.Task(expanded), kit.records(5), record, 0.05) for record in kit.records(3, 3.0, 5))
