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


def attack(library: systems.FastDP) -> float:
    random.seed(3)
    steps = library.train(kit.Task(Rarely), [{"x": torch.full((8,), 0.3), "labels": 1}], 0.05, 200)
    return max(float(kit.flat(sums).norm()) for sums in steps) / 0.05
