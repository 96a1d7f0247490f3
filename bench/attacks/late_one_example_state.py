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


def attack(system: kit.System) -> float:
    library, sums = systems.only_fastdp(system), []
    task = kit.Task(Remembering)
    for data in (kit.records(16), [*kit.records(16), kit.records(1, 30.0, 5)[0]]):
        private = library.start(task, data, 0.2, epochs=40)
        steps = [step for _ in range(40) for step in library.steps(private, task)]
        private.detach()
        sums.append(steps[-1])
    return float(torch.cat([(sums[0][name] - sums[1][name]).flatten() for name in sums[0]]).norm()) / 0.2
