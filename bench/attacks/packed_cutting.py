"""A collator that cuts each of its packed records to the shortest: a short record takes tokens from every other"""

import torch
import torch.nn.functional as F
from torch import nn

from . import kit, systems
from .late_packed_attention import packed


class Next(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor):
        logits = self.head(self.table(input_ids))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def cut(items):
    shortest = min(len(item["input_ids"]) for item in items)
    return packed([{"input_ids": item["input_ids"][:shortest]} for item in items])


def attack(system: kit.System) -> float:
    systems.only_fastdp(system)
    task = kit.Task(Next, collate=cut, options={"unit_map": "units"})
    return kit.moved(system, task, kit.tokens(12, [9, 12]), kit.tokens(1, [2], seed=3)[0], 0.05)
