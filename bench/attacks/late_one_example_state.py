"""On the route that runs one example at a time, a state that opens after some steps and holds the example before"""

import torch

from . import kit, systems


class Remembering(kit.Net):
    calls = 0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        # Whoever reads numbers of the data has each example run alone.
        hidden = hidden * (1 + abs(hidden[0, 0].item()))
        self.calls += 1
        last, self.__dict__["last"] = self.__dict__.get("last", hidden[:1]), hidden[:1].detach() ** 3
        return hidden + last if self.calls > 400 else hidden


def attack(library: systems.FastDP) -> float:
    return library.moves(kit.Task(Remembering), kit.records(16), kit.outlier(30.0), 0.2, 40)
