"""DP-ZO as settings: the clipping of one number, how far the two forward passes lie apart, and the seed of the directions.

Tang et al., "Private Fine-tuning of Large Language Models with Zeroth-order Optimization" (arXiv 2401.04343), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastdp.engine.clip.policy import Policy
from fastdp.methods.geometry import clip_groups
from fastdp.methods.zeroth.direction import RandomDirection
from fastdp.private.method import Method
from fastdp.private.preparation import Outcome
from fastdp.validate import integer, positive


@dataclass(frozen=True)
class DPZO(Method):
    """Two forward passes a step, at w + h z and w - h z for a public random direction z, and no backward pass.

    Each example's slope, the difference of its losses over 2 h, is clipped to [-C, C]. The sum gets Gaussian noise, on one
    number, and the weights move along z by what the optimizer makes of it. Passes run in evaluation mode, without dropout.

    Args:
        max_slope: C.
        smoothing: h; small beside the weights, and large enough that losses in their precision differ.
        seed: of the directions, which are public.

    Raises ValueError for values out of range.
    """

    max_slope: float = 1.0
    smoothing: float = 1e-3
    seed: int = 0
    mechanism: str = field(default="DP-ZO", init=False)

    def __post_init__(self) -> None:
        positive(max_slope=self.max_slope, smoothing=self.smoothing)
        integer(seed=self.seed)

    def install(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> RandomDirection:
        return RandomDirection(model, optimizer, self.smoothing, self.seed)

    @property
    def needs_public_shapes(self) -> bool:
        """A slope has 1 / (2 h) times the rounding of a loss."""
        return True

    def policy(
        self, parameters: Mapping[str, torch.nn.Parameter], noise_multiplier: float, outcome: Outcome | None = None
    ) -> Policy:
        return clip_groups(parameters, noise_multiplier, self.max_slope)

    def describe(self) -> dict[str, Any]:
        return {"name": self.mechanism, "max_slope": self.max_slope, "smoothing": self.smoothing, "seed": self.seed}
