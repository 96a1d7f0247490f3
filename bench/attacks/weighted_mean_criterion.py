"""A cross-entropy with class weights as the user's criterion divides by the weights of the whole batch"""

import torch
import torch.nn.functional as F

from . import kit

WEIGHTS = torch.tensor([0.01, 0.01, 10.0, 1.0, 1.0, 1.0, 1.0, 1.0])


def weighted(output: torch.Tensor, batch) -> torch.Tensor:
    return F.cross_entropy(output, batch["labels"], weight=WEIGHTS)


def attack(system: kit.System) -> float:
    plain = [{**record, "labels": i % 2} for i, record in enumerate(kit.records(16))]
    task = kit.Task(kit.Scores, criterion=weighted)
    return kit.moved(system, task, plain, {**kit.outlier(1.0), "labels": 2}, 0.5)
