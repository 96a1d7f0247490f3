"""An embedding whose gradients are sparse tensors, with one token many times in a record"""

import torch
import torch.nn.functional as F
from torch import nn

from . import kit


class Sparse(kit.Model):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16, sparse=True), nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor):
        logits = self.head(self.table(ids).sum(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def attack(system: kit.System) -> float:
    plain = [{"ids": torch.arange(i, i + 8), "labels": i % 3} for i in range(5)]
    return kit.moved(system, kit.Task(Sparse), plain, {"ids": torch.full((8,), 40), "labels": 1}, 0.05)
