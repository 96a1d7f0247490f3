"""Cancelling tokens under bfloat16 autocast, where factors are rounded before they meet"""

import torch

from . import kit
from .cancelling_tokens import WIDTH, Tokens


class Autocast(Tokens):
    def forward(self, x: torch.Tensor, sign: torch.Tensor, labels: torch.Tensor):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, sign, labels)


def attack(system: kit.System) -> float:
    def record(size: float, apart: float, seed: int) -> kit.Record:
        x, d = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        return {
            "x": torch.stack([size * x + apart * d, size * x]),
            "sign": torch.tensor([1.0, -1.0]),
            "labels": seed % 4,
        }

    plain = [record(1.0, 1.0, seed) for seed in range(4)]
    extremes = [record(size, apart, 10 + seed) for size in (1e3, 1e5) for apart in (1.0, 10.0) for seed in range(2)]
    return max(kit.moved(system, kit.Task(Autocast), plain, extreme, 1e-3) for extreme in extremes)
