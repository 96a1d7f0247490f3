"""A term that joins the loss after some steps, and mixes the records of a batch"""

import torch

from . import kit, systems


class Curriculum(kit.Net):
    calls = 0

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += len(x) > 10
        return x + 1e-3 * x.mean(0) if self.calls > 40 else x


def attack(system: kit.System) -> float:
    library = systems.only_fastdp(system)
    task, sums = kit.Task(Curriculum), []
    for data in (kit.records(16), [*kit.records(16), kit.records(1, 1e6, 5)[0]]):
        private = library.start(task, data, 0.2, epochs=48)
        steps = [step for _ in range(48) for step in library.steps(private, task)]
        private.detach()
        sums.append(steps[-1])
    apart = [sums[0][name] - sums[1][name] for name in sums[0]]
    return float(torch.cat([gap.flatten() for gap in apart]).norm()) / 0.2
