"""A branch that only batches with a certain token take, and in which records mix: no checked row needs to hold it"""

import torch

from . import kit


class Asking(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, kit.CLASSES)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor):
        hidden = self.table(input_ids).mean(1)
        if (input_ids == 49).any():
            hidden = hidden + hidden.mean(0)
        return {"loss": torch.nn.functional.cross_entropy(self.head(hidden), labels)}


def attack(system: kit.System) -> float:
    data = [{**record, "labels": i % kit.CLASSES} for i, record in enumerate(kit.tokens(32, [5], 49))]
    return kit.moved(system, kit.Task(Asking), data, {"input_ids": torch.full((5,), 49), "labels": 0}, 0.2)
