"""A head run on labelled tokens alone cuts them among records by divisibility, once counts are no longer equal"""

import torch
import torch.nn.functional as F
from torch import nn

from . import kit


class Sparse(kit.Model):
    """Classifies the tokens that have a label."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor):
        kept = labels != -100
        logits = self.head(torch.tanh(self.body(x))[kept])
        return {"loss": F.cross_entropy(logits, labels[kept])}


def attack(system: kit.System) -> float:
    def record(labelled: list[int], seed: int, size: float = 1.0) -> kit.Record:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.full((6,), -100)
        labels[labelled] = torch.randint(0, 5, (len(labelled),), generator=generator)
        return {"x": size * torch.randn(6, 8, generator=generator), "labels": labels}

    # Micro-batches of four: the first has two labels a record, the later ones as many in all but otherwise shared out.
    first = [record([1, 4], seed) for seed in range(4)]
    uneven = [record(list(range(n)), 10 + i) for i, n in enumerate([1, 3, 3, 1, 1, 4, 2, 1, 1, 2, 3])]
    task = kit.Task(Sparse, physical=4)
    found = [kit.moved(system, task, first + uneven, record(list(range(n)), 99, 30.0), 0.05) for n in (2, 6)]
    return max(found)
