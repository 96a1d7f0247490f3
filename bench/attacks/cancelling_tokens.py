"""Two tokens of one record that cancel have a Gram norm of rounding, so the record is not clipped"""

import torch
import torch.nn.functional as F
from torch import nn

from . import kit

WIDTH = 256


class Tokens(kit.Model):
    """One layer over tokens [rows, 2, WIDTH], the second of which counts against the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor, sign: torch.Tensor, labels: torch.Tensor):
        logits = (self.layer(x) * sign.unsqueeze(-1)).sum(1)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def record(size: float, apart: float, seed: int) -> kit.Record:
    """Two tokens that are ``apart`` from each other, and ``size`` from nothing."""
    x, d = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
    tokens = torch.stack([size * x + apart * d, size * x])
    return {"x": tokens, "sign": torch.tensor([1.0, -1.0]), "labels": seed % 4}


def attack(system: kit.System) -> float:
    plain = [record(1.0, 1.0, seed) for seed in range(4)]
    extremes = [record(size, apart, 10 + seed) for size in (1e3, 1e5) for apart in (1.0, 10.0) for seed in range(6)]
    return max(kit.moved(system, kit.Task(Tokens), plain, extreme, 1e-3) for extreme in extremes)
