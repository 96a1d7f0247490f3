"""A number that the collator makes of all records and that is no row's: the model turns every record round by it"""

from . import kit


def turned(own, x, labels, *, total=0):
    return kit.Net.forward(own, x * (1 if total < 200 else -1), labels)


def collate(items):
    return {**kit.stack(items), "total": sum(item["x"].abs().sum() for item in items)}


def attack(system: kit.System) -> float:
    task = kit.Task(kit.net(forward=turned), collate=collate)
    return kit.moved(system, task, kit.records(8), kit.outlier(100.0), 0.2)
