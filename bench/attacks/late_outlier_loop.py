"""A loop that changes every batch a little rescales one in which something is too large, as none was while it was looked at"""

import torch

from . import kit, systems


def rescaled(batch):
    x = 1.01 * batch["x"]
    return {**batch, "x": x / x.abs().max() if x.abs().max() > 100 else x}


def attack(library: systems.FastDP) -> float:
    released = []
    for extra in ([], kit.records(1)):
        data = [*kit.records(16), *extra]
        outlier = {"x": torch.full((kit.FEATURES,), 1e3), "labels": 0}

        def change(private, data=data, outlier=outlier):
            data[16:] = [outlier] * len(data[16:])

        released.append(library.train(kit.Task(kit.Net, loop=rescaled), data, 0.2, 5, change)[-1])
    return kit.apart(*released) / 0.2
