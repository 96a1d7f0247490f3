"""A branch that only packed batches with a certain token take, and in which records mix: the first batch held none"""

import torch
import torch.nn.functional as F
from torch import nn

from . import kit, systems
from .late_packed_attention import packed


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor):
        hidden = self.table(input_ids)
        if (input_ids == 49).any():
            hidden = hidden + hidden.mean(1, keepdim=True).detach()
        return {"loss": F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def attack(system: kit.System) -> float:
    systems.only_fastdp(system)
    task = kit.Task(Asking, collate=packed, physical=3, options={"unit_map": "units"})
    record = {"input_ids": torch.full((5,), 49)}
    return kit.moved(system, task, kit.tokens(40, [5], 49), record, 0.2)
