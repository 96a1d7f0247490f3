"""A term on the parameters beside the model's own loss, scaled by the batch"""

import torch

from . import kit


def attack(system: kit.System) -> float:
    model = kit.Net()

    def loss(output, batch) -> torch.Tensor:
        return output["loss"] + batch["x"].sum() * model.second.weight.sum()

    task = kit.Task(lambda: model, criterion=loss, options={"loss_reduction": None} if system.name == "fastdp" else {})
    return kit.moved(system, task, kit.records(), kit.outlier(50.0))
