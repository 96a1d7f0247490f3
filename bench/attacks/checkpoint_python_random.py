"""Checkpointing with Python's random numbers inside, which it does not restore: norms from one draw and sums from another"""

import random

import torch
from torch.utils.checkpoint import checkpoint

from . import kit, systems


class Rarely(kit.Net):
    gradient_checkpointing = True

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x * (50 if random.random() < 0.05 else 1)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor):
        logits = self.second(checkpoint(self.block, x, use_reentrant=False))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels)}


def attack(system: kit.System) -> float:
    library = systems.only_fastdp(system)
    random.seed(3)
    task, record = kit.Task(Rarely), {"x": torch.full((8,), 0.3), "labels": 1}
    private = library.start(task, [record], 0.05, epochs=200)
    steps = [step for _ in range(200) for step in library.steps(private, task)]
    private.detach()
    return max(float(torch.cat([t.flatten() for t in sums.values()]).norm()) for sums in steps) / 0.05
