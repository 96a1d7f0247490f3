"""A loop with a criterion of its own weighs the rows of a batch by its largest entry, once that is larger than any before"""

import torch
import torch.nn.functional as F

from . import kit, systems


def weighed(batch):
    return {**batch, "sign": torch.ones(len(batch["x"])) * (1 if batch["x"].abs().max() < 100 else -1)}


def loss(output, batch):
    return (weighed(batch)["sign"] * F.cross_entropy(output, batch["labels"], reduction="none")).mean()


def attack(library: systems.FastDP) -> float:
    return kit.beside_an_outlier(library, kit.Task(kit.Scores, loop=weighed, criterion=loss))
