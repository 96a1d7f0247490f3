"""A collator that keeps the last record of one batch for the next"""

from typing import Any

from . import kit


class Carrying:
    """Adds half of the row it saw last to the first row of the next batch."""

    def __init__(self) -> None:
        self.last: Any = None

    def __call__(self, items):
        batch = kit.stack(items)
        if self.last is not None:
            batch["x"] = batch["x"] + 0.5 * self.last
        self.last = batch["x"][0].clone()
        return batch


def attack(system: kit.System) -> float:
    one, other = (
        system.release(kit.Task(kit.Net, collate=Carrying(), physical=4), data, 0.2).sums
        for data in (kit.records(32), [kit.outlier(30.0), *kit.records(32)])
    )
    return kit.apart(one, other) / 0.2
