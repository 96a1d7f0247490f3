"""A collator that centres a batch by its own mean from twelve records on, as hardly a few that are looked at are so many"""

from . import kit


def centred(items):
    batch = kit.stack(items)
    return batch | {"x": batch["x"] - batch["x"].mean(0)} if len(items) > 12 else batch


def attack(system: kit.System) -> float:
    return kit.moved(system, kit.Task(kit.Net, collate=centred), kit.records(16), kit.outlier(1e3), 0.2)
