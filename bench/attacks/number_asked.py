"""A number read off the whole batch with item() scales the activations of every record once it passes a limit"""

import torch

from . import kit


class Reading(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, kit.CLASSES)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor):
        hidden = self.table(input_ids).mean(1)
        if input_ids.max().item() > 48:
            hidden = hidden * 3
        return {"loss": torch.nn.functional.cross_entropy(self.head(hidden), labels)}


def attack(system: kit.System) -> float:
    data = [{**record, "labels": i % kit.CLASSES} for i, record in enumerate(kit.tokens(32, [5], 49))]
    return kit.moved(system, kit.Task(Reading), data, {"input_ids": torch.full((5,), 49), "labels": 0}, 0.2)
