"""The loop hands the model a number that it made of the whole batch: the model turns every record round by it"""

import torch
import torch.nn.functional as F

from . import kit


class Turning(kit.Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor, *, total: torch.Tensor | float = 0.0):
        logits = self.second(torch.tanh(self.first(x * (1 if total < 200 else -1))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def summed(batch):
    return {**batch, "total": batch["x"].abs().sum()}


def attack(system: kit.System) -> float:
    return kit.moved(system, kit.Task(Turning, loop=summed), kit.records(8), kit.records(1, 100.0, 5)[0], 0.2)
