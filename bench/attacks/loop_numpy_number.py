"""The loop hands the model a number that numpy made of the whole batch: the model turns every record round by it"""

from . import collated_number, kit


def summed(batch):
    return {**batch, "total": batch["x"].abs().sum().numpy()}


def attack(system: kit.System) -> float:
    task = kit.Task(kit.net(forward=collated_number.turned), loop=summed)
    return kit.moved(system, task, kit.records(8), kit.outlier(100.0), 0.2)
