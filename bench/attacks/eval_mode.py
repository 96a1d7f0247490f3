"""A model left in evaluation mode, whose gradients nothing clips"""

from . import kit


def attack(system: kit.System) -> float:
    evaluated = kit.net(train=lambda own, mode=True: kit.Net.train(own, False))
    return kit.moved(system, kit.Task(evaluated), kit.records(), kit.outlier(100.0), 0.05)
