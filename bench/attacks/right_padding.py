"""A long record changes the padding of everyone else, and a head or a loss that reads padding lets it through"""

import torch
import torch.nn.functional as F

from . import kit


class Mean(kit.Words):
    """Averages over tokens, padding included."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor):
        logits = self.head(self.table(input_ids).mean(1))
        return {"loss": F.cross_entropy(logits, labels[:, 0].clamp(min=0)), "logits": logits}


def attack(system: kit.System) -> float:
    task = kit.Task(Mean, collate=kit.padded)
    return kit.moved(system, task, kit.tokens(12, [6, 7, 9]), kit.tokens(1, [60], seed=3)[0], 0.5)
