"""Cancelling tokens under bfloat16 autocast, where factors are rounded before they meet"""

import torch

from . import kit
from .cancelling_tokens import Tokens, record


class Autocast(Tokens):
    def forward(self, x: torch.Tensor, sign: torch.Tensor, labels: torch.Tensor):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, sign, labels)


def attack(system: kit.System) -> float:
    plain = [record(1.0, 1.0, seed) for seed in range(4)]
    extremes = [record(size, apart, 10 + seed) for size in (1e3, 1e5) for apart in (1.0, 10.0) for seed in range(2)]
    return max(kit.moved(system, kit.Task(Autocast), plain, extreme, 1e-3) for extreme in extremes)
