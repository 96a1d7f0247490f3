"""Checkpointing that does not restore the random state: norms come from one dropout mask and sums from another"""

import torch
from torch.utils.checkpoint import checkpoint

from . import kit


class Checkpointed(kit.Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        def drop(h: torch.Tensor) -> torch.Tensor:
            return self.layer(self.drop(1e3 * h))

        return checkpoint(drop, hidden, use_reentrant=False, preserve_rng_state=False)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(16, 16), torch.nn.Dropout(0.9)
        self.gradient_checkpointing = True


def attack(system: kit.System) -> float:
    return max(kit.moved(system, kit.Task(Checkpointed), [], record, 1e-2) for record in kit.records(12, 3.0, 5))
