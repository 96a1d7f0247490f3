"""A collator that puts the longest record in everyone's place, as one that fills a batch to a fixed size does"""

from . import kit


def repeating(items):
    """As many rows as were asked for; those without a label repeat the last that has one."""
    kept = [item for item in items if item["labels"] >= 0] or items
    return kit.stack([item if item["labels"] >= 0 else kept[-1] for item in items])


def attack(system: kit.System) -> float:
    data = [{**record, "labels": -1 if i % 2 else 0} for i, record in enumerate(kit.records(16))]
    return kit.moved(system, kit.Task(kit.Net, collate=repeating), data, {**kit.outlier(9.0), "labels": 1}, 0.2)
