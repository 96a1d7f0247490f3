"""Packed rows whose records see each other once a row is long: the first batch, which was checked, held none so long"""

import torch
import torch.nn.functional as F
from torch import nn

from . import kit, systems


class Leaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor):
        hidden = self.table(input_ids)
        hidden = hidden + hidden.cumsum(1).detach() if input_ids.shape[1] > 12 else hidden
        return {"loss": F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def packed(items):
    row = torch.cat([item["input_ids"] for item in items])[None]
    units = torch.cat([torch.full((len(item["input_ids"]),), n) for n, item in enumerate(items)])[None]
    return {"input_ids": row, "labels": row, "units": units}


def attack(system: kit.System) -> float:
    systems.only_fastdp(system)
    task = kit.Task(Leaking, collate=packed, physical=3, options={"unit_map": "units"})
    others = kit.tokens(3, [4]) + kit.tokens(5, [9], seed=2)
    return kit.moved(system, task, others, kit.tokens(1, [9], seed=3)[0], 0.05, first=True)
