"""A counter inside a checkpointed block: after some steps norms come from one recomputation and sums from another"""

import torch
from torch.utils.checkpoint import checkpoint

from . import kit, systems


class Counting(kit.Net):
    gradient_checkpointing, runs = True, 0

    def block(self, hidden: torch.Tensor) -> torch.Tensor:
        self.runs += len(hidden) > 10 and torch.is_grad_enabled()
        return hidden * (1e4 if self.runs > 40 and self.runs % 2 == 0 else 1.0)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, hidden, use_reentrant=True)


def attack(system: kit.System) -> float:
    library = systems.only_fastdp(system)
    task, largest = kit.Task(Counting), 0.0
    private = library.start(task, kit.records(16, 0.01), 1e-3, epochs=48)
    for _ in range(48):
        for step in library.steps(private, task):
            size = float(torch.cat([total.flatten() for total in step.values()]).norm())
            largest = max(largest, size / 1e-3 / 16)
    private.detach()
    return largest
