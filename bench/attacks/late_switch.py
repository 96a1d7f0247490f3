"""A switch on a module, turned by the training loop after some steps, after which the records of a batch mix"""

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    switched = kit.net(before=lambda own, x: x + own.mixing * x.mean(0), mixing=0.0)

    def switch(private) -> None:
        private.model.mixing = 0.1

    return library.moves(kit.Task(switched), kit.records(16), kit.outlier(1e6), 0.2, 7, switch)
