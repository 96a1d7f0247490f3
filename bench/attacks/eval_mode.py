"""A model left in evaluation mode, whose gradients nothing clips"""

from . import kit


class Evaluated(kit.Net):
    def train(self, mode: bool = True):
        return super().train(False)


def attack(system: kit.System) -> float:
    return kit.moved(system, kit.Task(Evaluated), kit.records(), kit.records(1, 100.0, 5)[0], 0.05)
