"""F.embedding with max_norm rescales the rows of a trained table that a batch contains, without noise"""

import torch
import torch.nn.functional as F
from torch import nn

from . import kit


class Renormed(kit.Model):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(3 * torch.randn(20, 8)), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor):
        logits = self.head(F.embedding(ids, self.table, max_norm=1.0).mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def attack(system: kit.System) -> float:
    plain = [{"ids": torch.tensor([i, i + 1, i + 2]), "labels": i % 3} for i in range(6)]
    return kit.moved(system, kit.Task(Renormed), plain, {"ids": torch.tensor([15, 16, 17]), "labels": 0})
