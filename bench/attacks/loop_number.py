"""The loop hands the model a number that it made of the whole batch: the model turns every record round by it"""

from . import kit
from .collated_number import turned


def summed(batch):
    return {**batch, "total": batch["x"].abs().sum()}


def attack(system: kit.System) -> float:
    return kit.moved(system, kit.Task(kit.net(forward=turned), loop=summed), kit.records(8), kit.outlier(100.0), 0.2)
