"""A switch on a module, turned by the training loop after some steps, after which the records of a batch mix"""

import torch

from . import kit, systems


class Switched(kit.Net):
    mixing = 0.0

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixing * x.mean(0)


def switch(private) -> None:
    private.model.mixing = 0.1


def attack(library: systems.FastDP) -> float:
    return library.moves(kit.Task(Switched), kit.records(16), kit.records(1, 1e6, 5)[0], 0.2, 7, switch)
