"""A cross-entropy over all tokens of a batch as the user's criterion: one long record shrinks everyone else's loss"""

import torch
import torch.nn.functional as F

from . import kit


class Tagger(kit.Words):
    def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table(input_ids)))


def token_mean(output: torch.Tensor, batch) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def attack(system: kit.System) -> float:
    task = kit.Task(Tagger, collate=kit.padded, criterion=token_mean)
    return kit.moved(system, task, kit.tokens(20, [3, 4]), kit.tokens(1, [400], seed=3)[0], 0.7)
