"""Activations quantised by one scale for the whole batch, in a model with one bfloat16 parameter"""

import torch

from . import kit


def attack(system: kit.System) -> float:
    def quantised(own, x):
        scale = (x.detach().abs().max() / 127).clamp(min=1e-8)
        return x + ((x / scale).round() * scale - x).detach()

    parts = {"gain": lambda: torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16))}
    task = kit.Task(kit.net(before=quantised, between=lambda own, hidden: hidden * own.gain.float(), parts=parts))
    return max(kit.moved(system, task, kit.records(32), kit.outlier(size), 0.2) for size in (30.0, 1e4))
