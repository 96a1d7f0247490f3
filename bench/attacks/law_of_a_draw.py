"""Noise whose deviation follows the batch's largest entry: while nothing is drawn by chance, nothing of it shows"""

import torch

from . import kit

_Noised = kit.net(before=lambda self, x: torch.normal(x, x.detach().abs().max().expand(x.shape) / 100))
_Masked = kit.net(before=lambda self, x: x * torch.bernoulli((1 / (1 + x.detach().abs().max())).expand(x.shape)))


def attack(system: kit.System) -> float:
    return max(
        kit.moved(system, kit.Task(model), kit.records(16), kit.outlier(100.0), 0.2) for model in (_Noised, _Masked)
    )
