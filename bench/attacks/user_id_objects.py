"""User ids that are objects without equality: each row of the same person counts as another person"""

from . import kit


class Person:
    def __init__(self, name: str) -> None:
        self.name = name


def attack(system: kit.System) -> float:
    row = kit.records(1, 5.0, 3)[0]
    ids = [Person(name) for name in "abbbbbbb"]
    task = kit.Task(kit.Net, options={"user_ids": ids, "max_examples_per_user": 8, "batch_size": 8})
    sums = system.release(task, [kit.records(1)[0], *[row] * 7], 0.05).sums
    # Seven rows of one person beside one of another, who moves 1 at most.
    return float(kit.flat(sums).norm()) / 0.05 - 1
