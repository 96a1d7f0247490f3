"""Missing user ids, which are NaN and so equal to none: each row of the same person counts as another person"""

from . import kit


def attack(system: kit.System) -> float:
    row = kit.records(1, 5.0, 3)[0]
    ids = [0.0, *[float("nan") for _ in range(7)]]
    task = kit.Task(kit.Net, options={"user_ids": ids, "max_examples_per_user": 8, "batch_size": 8})
    sums = system.release(task, [kit.records(1)[0], *[row] * 7], 0.05).sums
    # Seven rows of one person beside one of another, who moves 1 at most.
    return float(kit.flat(sums).norm()) / 0.05 - 1
