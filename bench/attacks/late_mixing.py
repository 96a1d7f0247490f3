"""A term that joins the loss after some steps, and mixes the records of a batch"""

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    def late(own, x):
        own.calls += len(x) > 10
        return x + 1e-3 * x.mean(0) if own.calls > 40 else x

    task = kit.Task(kit.net(before=late, calls=0))
    return library.moves(task, kit.records(16), kit.outlier(1e6), 0.2, 48)
