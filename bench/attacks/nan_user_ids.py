"""Missing user ids, which are NaN and so equal to none: each row of the same person counts as another person"""

from collections.abc import Sequence

from . import kit


def beside_one(system: kit.System, ids: Sequence[object]) -> float:
    """How much seven rows of one person add, of whom ``ids`` speak, to that of another, who moves 1 at most."""
    row = kit.records(1, 5.0, 3)[0]
    task = kit.Task(kit.Net, options={"user_ids": ids, "max_examples_per_user": 8, "batch_size": 8})
    sums = system.release(task, [kit.records(1)[0], *[row] * 7], 0.05).sums
    return float(kit.flat(sums).norm()) / 0.05 - 1


def attack(system: kit.System) -> float:
    return beside_one(system, [0.0, *[float("nan") for _ in range(7)]])
