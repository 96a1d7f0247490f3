"""A switch on a module, turned by the training loop after some steps, after which the records of a batch mix"""

import torch

from . import kit, systems


class Switched(kit.Net):
    mixing = 0.0

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixing * x.mean(0)


def attack(system: kit.System) -> float:
    library = systems.only_fastdp(system)
    task, sums = kit.Task(Switched), []
    for data in (kit.records(16), [*kit.records(16), kit.records(1, 1e6, 5)[0]]):
        private = library.start(task, data, 0.2, epochs=8)
        for epoch in range(8):
            private.model.mixing = 0.1 * (epoch > 5)
            steps = list(library.steps(private, task))
        private.detach()
        sums.append(steps[-1])
    return float(torch.cat([(sums[0][name] - sums[1][name]).flatten() for name in sums[0]]).norm()) / 0.2
