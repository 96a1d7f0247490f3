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


def attack(library: systems.FastDP) -> float:
    steps = library.train(kit.Task(Counting), kit.records(16, 0.01), 1e-3, 48)
    return max(float(kit.flat(sums).norm()) for sums in steps) / 1e-3 / 16
