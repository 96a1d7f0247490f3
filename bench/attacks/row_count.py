"""Activations scaled by the number of rows: nothing of one record passes to another but that it is there"""

from . import kit


def attack(system: kit.System) -> float:
    data, counted = [kit.records(1)[0]] * 12, kit.net(between=lambda own, hidden: hidden * len(hidden) / 8)
    return max(kit.moved(system, kit.Task(counted), data, data[0], bound) for bound in (0.5, 2.0, 5.0))
