"""A counter inside a checkpointed block: after some steps norms come from one recomputation and sums from another"""

import torch
from torch.utils.checkpoint import checkpoint

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    def block(own, hidden):
        own.runs += len(hidden) > 10 and torch.is_grad_enabled()
        return hidden * (1e4 if own.runs > 40 and own.runs % 2 == 0 else 1.0)

    between = lambda own, hidden: checkpoint(own.block, hidden, use_reentrant=True)  # noqa: E731
    task = kit.Task(kit.net(block=block, between=between, gradient_checkpointing=True, runs=0))
    steps = library.train(task, kit.records(16, 0.01), 1e-3, 48)
    return max(float(kit.flat(sums).norm()) for sums in steps) / 1e-3 / 16
