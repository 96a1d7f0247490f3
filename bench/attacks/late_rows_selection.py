"""A branch on how many records a batch has: none that was looked at had so many, and beyond it they mix"""

import torch

from . import kit, systems


class Crowded(kit.Net):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.cumsum(0) if len(x) > 11 else x


def attack(system: kit.System) -> float:
    library, sums = systems.only_fastdp(system), []
    task, seed = kit.Task(Crowded), 4
    for size in (1.0, 30.0):
        data = [*kit.records(1, size, 5), *kit.records(31)]
        private = library.start(task, data, 0.2, batch_size=12, epochs=12, unsafe_seed=seed)
        steps = [step for _ in range(4) for step in library.steps(private, task)]
        private.detach()
        sums.append(steps)
    apart = [torch.cat([(a[name] - b[name]).flatten() for name in a]).norm() for a, b in zip(*sums)]
    # One record was exchanged for another, which may move a sum by two bounds.
    return float(max(apart)) / 0.2 / 2
