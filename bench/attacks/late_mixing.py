"""A term that joins the loss after some steps, and mixes the records of a batch"""

import torch

from . import kit, systems


class Curriculum(kit.Net):
    calls = 0

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += len(x) > 10
        return x + 1e-3 * x.mean(0) if self.calls > 40 else x


def attack(library: systems.FastDP) -> float:
    return library.moves(kit.Task(Curriculum), kit.records(16), kit.records(1, 1e6, 5)[0], 0.2, 48)
