"""A bank of earlier records' features that opens after some steps, for full batches alone, and lies in no module"""

import torch

from . import kit, systems

BANK: list[torch.Tensor] = []


class Bank(kit.Net):
    calls = 0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += len(hidden) > 8
        if self.calls < 20 or len(hidden) <= 8:
            return hidden
        keys = torch.cat(BANK[-4:]) if BANK else hidden.detach()
        BANK.append(hidden.detach())
        return hidden + torch.softmax(5 * hidden @ keys.T, 1) @ keys


def attack(system: kit.System) -> float:
    library, sums = systems.only_fastdp(system), []
    for data in (kit.records(16), [kit.records(1, 30.0, 5)[0], *kit.records(16)]):
        BANK.clear()
        private = library.start(kit.Task(Bank), data, 0.2, epochs=40)
        steps = [step for _ in range(40) for step in library.steps(private, kit.Task(Bank))]
        private.detach()
        sums.append(steps[-1])
    return float(torch.cat([(sums[0][name] - sums[1][name]).flatten() for name in sums[0]]).norm()) / 0.2
