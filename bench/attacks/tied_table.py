"""A table read as embedding and head: a gradient that is assigned, not summed, before the norm is clipped too little"""

import torch
import torch.nn.functional as F
from torch import nn

from . import kit


class Tied(kit.Model):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: torch.Tensor):
        logits = self.head(self.table(input_ids))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def attack(system: kit.System) -> float:
    task = kit.Task(Tied, collate=kit.padded)
    return max(kit.moved(system, task, kit.tokens(4, [5]), record, 0.05) for record in kit.tokens(4, [3, 9], seed=2))
