"""The loop mixes each record with another of its batch, as mixup does, by a generator of its own"""

import torch

from . import kit


def attack(system: kit.System) -> float:
    generator = torch.Generator().manual_seed(0)

    def mixed(batch):
        other = torch.randperm(len(batch["x"]), generator=generator)
        return {**batch, "x": 0.7 * batch["x"] + 0.3 * batch["x"][other]}

    return kit.moved(system, kit.Task(kit.Net, loop=mixed), kit.records(8), kit.outlier(1e3), 0.2)
