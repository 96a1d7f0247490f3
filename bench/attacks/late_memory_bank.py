"""A bank of earlier records' features that opens after some steps, for full batches alone, and lies in no module"""

import torch

from . import kit, systems

BANK: list[torch.Tensor] = []


class Bank(kit.Net):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        BANK.clear()

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += len(hidden) > 8
        if self.calls < 20 or len(hidden) <= 8:
            return hidden
        keys = torch.cat(BANK[-4:]) if BANK else hidden.detach()
        BANK.append(hidden.detach())
        return hidden + torch.softmax(5 * hidden @ keys.T, 1) @ keys


def attack(library: systems.FastDP) -> float:
    return library.moves(kit.Task(Bank), kit.records(16), kit.outlier(30.0), 0.2, 40, first=True)
