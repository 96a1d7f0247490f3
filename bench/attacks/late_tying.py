"""Weights tied after the run was made private: the second use is one that nothing has traced"""

import torch
import torch.nn.functional as F
from torch import nn

from . import kit


class TiesLate(kit.Model):
    """Ties its head to its table after the first forward passes in training."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: torch.Tensor):
        self.calls += len(input_ids) > 2
        if self.calls > 12:
            self.head.weight = self.table.weight
        logits = self.head(self.table(input_ids))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def attack(system: kit.System) -> float:
    task = kit.Task(TiesLate, collate=kit.padded, physical=3)
    return kit.moved(system, task, kit.tokens(59, [5]), kit.tokens(1, [9], seed=2)[0], 0.05)
