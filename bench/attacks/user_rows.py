"""A user with many rows, the same one again and again: together they count once, or not at all"""

from . import kit


def attack(system: kit.System) -> float:
    row = kit.records(1, 5.0, 3)[0]

    def task(ids: list[int]) -> kit.Task:
        return kit.Task(kit.Net, options={"user_ids": ids, "max_examples_per_user": 4})

    less = system.release(task([0, 1, 2]), kit.records(3), 0.05).sums
    more = system.release(task([0, 1, 2] + [9] * 6), [*kit.records(3), *[row] * 6], 0.05).sums
    return kit.apart(more, less) / 0.05
