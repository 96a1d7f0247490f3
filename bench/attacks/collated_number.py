"""A number that the collator makes of all records and that is no row's: the model turns every record round by it"""

import torch
import torch.nn.functional as F

from . import kit


class Turning(kit.Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor, *, total: torch.Tensor | int = 0):
        logits = self.second(torch.tanh(self.first(x * (1 if total < 200 else -1))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def collate(items):
    return {**kit.stack(items), "total": sum(item["x"].abs().sum() for item in items)}


def attack(system: kit.System) -> float:
    return kit.moved(system, kit.Task(Turning, collate=collate), kit.records(8), kit.records(1, 100.0, 5)[0], 0.2)
