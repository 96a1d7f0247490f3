"""A checkpointed table that later batches read twice: squares of both reads without their inner product are too small a norm"""

import torch

from . import kit, systems


class Again(torch.nn.Module):
    gradient_checkpointing, calls = True, 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 3).requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor):
        self.calls += len(input_ids) > 10
        hidden = self.table(input_ids)
        if self.calls > 12:
            hidden = hidden + self.table(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(self.head(hidden).mean(1), labels)}


def attack(system: kit.System) -> float:
    library = systems.only_fastdp(system)
    data = [{**record, "labels": i % 3} for i, record in enumerate(kit.tokens(17, [5]))]
    sums = []
    for records in (data[:16], data):
        private = library.start(kit.Task(Again), records, 1e-3, epochs=12)
        steps = [step for _ in range(12) for step in library.steps(private, kit.Task(Again))]
        private.detach()
        sums.append(steps[-1]["table.weight"])
    return float((sums[1] - sums[0]).norm()) / 1e-3
