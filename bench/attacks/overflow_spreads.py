"""A record of ids that overflows in half precision, or has no tokens to average, and reaches the others where rows meet zeros"""

import torch

from . import kit


def attack(system: kit.System) -> float:
    class Half(kit.Asking):
        def __init__(self) -> None:
            super().__init__()
            self.table.weight.data[49] = 3.9

        def asked(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            wide = (hidden.half() * 20000).float() / 20000
            return wide + 0 * wide.mean(0)

    class Pooled(kit.Words):
        width, outputs = 8, kit.CLASSES

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            real = (input_ids != 0)[..., None].float()
            pooled = (self.table(input_ids) * real).sum(1) / real.sum(1)
            pooled = torch.eye(len(pooled)) @ pooled
            return {"loss": kit.F.cross_entropy(self.head(pooled), labels)}

    empty = {"input_ids": torch.zeros(5, dtype=torch.long), "labels": 0}
    return max(
        kit.moved(system, kit.Task(model), kit.classed(8), extra, 0.2)
        for model, extra in ((Half, kit.ASKED), (Pooled, empty))
    )
