"""A buffer replaced by another tensor in each training forward leaves with the model's state without noise"""

from . import kit


def attack(system: kit.System) -> float:
    def watched(own, x):
        if own.training:
            own.mean = x.detach().mean(0)
        return x

    return kit.moved(system, kit.Task(kit.net(kit.Keeping, before=watched)), kit.records(), kit.outlier(100.0))
