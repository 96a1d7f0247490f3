"""A model that cuts its mean loss off at a limit which only a late record's batch reaches, and that batch adds nothing at all"""

import torch

from . import kit, systems


class Model(kit.Asking):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.table.weight[49] *= 400

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(input_ids, labels)["loss"].clamp(max=4.0)}


def attack(library: systems.FastDP) -> float:
    others, before = kit.classed(), kit.classed(1)[0]
    rare = [{"input_ids": torch.full((5,), 49), "labels": label} for label in range(kit.CLASSES)]
    return max(kit.beside_a_late(library, kit.Task(Model), others, before, after) for after in rare)
