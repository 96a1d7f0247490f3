"""A checkpointed table that later batches read twice: squares of both reads without their inner product are too small a norm"""

import torch

from . import kit, systems


class Again(kit.Model):
    gradient_checkpointing, calls = True, 0

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 3).requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor):
        self.calls += len(input_ids) > 10
        hidden = self.table(input_ids)
        if self.calls > 12:
            hidden = hidden + self.table(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(self.head(hidden).mean(1), labels)}


def attack(library: systems.FastDP) -> float:
    *data, extra = ({**record, "labels": i % 3} for i, record in enumerate(kit.tokens(17, [5])))
    return library.moves(kit.Task(Again), data, extra, 1e-3, 12)
