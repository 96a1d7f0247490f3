"""A weight read twice, score(a) - score(b) with a close to b: squares and cross term cancel to rounding, or to NaN"""

import torch
import torch.nn.functional as F
from torch import nn

from . import kit


class Pairs(kit.Model):
    """Prefers the first of two."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(16, 1)

    def forward(self, a: torch.Tensor, b: torch.Tensor):
        margin = (self.score(a) - self.score(b)).squeeze(-1)
        return {"loss": F.binary_cross_entropy_with_logits(margin, torch.ones_like(margin))}


def attack(system: kit.System) -> float:
    def pair(size: float, apart: float, seed: int) -> kit.Record:
        generator = torch.Generator().manual_seed(seed)
        a = size * torch.randn(16, generator=generator)
        return {"a": a, "b": a + apart * torch.randn(16, generator=generator)}

    plain = [pair(1.0, 1.0, seed) for seed in range(4)]
    extremes = [pair(size, apart, seed) for size in (1e3, 1e5, 1e6) for apart in (size * 1e-6, 1.0) for seed in (8, 9)]
    return max(kit.moved(system, kit.Task(Pairs), plain, extreme, 1e-3) for extreme in extremes)
