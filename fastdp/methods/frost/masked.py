"""Training of single entries: the baselines that choose parameters one by one (PARAM and PVAL of the paper)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fastdp.engine.bounds import UpperNorms
from fastdp.engine.clip.policy import Policy


@dataclass(frozen=True)
class MaskedPolicy(Policy):
    """Group 0, the entries inside the masks, is clipped and noised; group 1, everything else, gets exact zeros.

    Nothing of group 1 is released, so the multiplier is that of group 0.
    """

    @classmethod
    def of(cls, masks: Mapping[str, torch.Tensor], max_grad_norm: float, noise_multiplier: float) -> MaskedPolicy:
        """Clip the gradient inside boolean ``masks``, by parameter and of its shape, to ``max_grad_norm``."""
        std = noise_multiplier * max_grad_norm
        return cls((max_grad_norm, max_grad_norm), (std, 0.0), dict.fromkeys(masks, (0, 1)), masks)

    @property
    def noise_multiplier(self) -> float:
        """Noise standard deviation over the bound, of the entries that are released."""
        return self.stds[0] / self.bounds[0]

    def ratios(self, upper: UpperNorms) -> torch.Tensor:
        """As `Policy.ratios`, of the entries that are released."""
        return upper.measured[0].clamp(min=0).sqrt() / self.bounds[0]

    def scales(self, upper: UpperNorms) -> torch.Tensor:
        """As `Policy.scales`, with 0 for the entries outside."""
        scales = super().scales(upper)
        scales[1] = 0.0
        return scales


def largest(scores: Mapping[str, torch.Tensor], ratio: float) -> dict[str, torch.Tensor]:
    """Masks of the entries with the largest scores: at most ``ratio`` of all, ties at the last place left out.

    Raises ValueError if that is not one entry.
    """
    flat = torch.cat([score.detach().reshape(-1).float().cpu() for score in scores.values()])
    count = int(ratio * flat.numel())
    if count < 1:
        raise ValueError(f"unfreezing_ratio {ratio:g} of {flat.numel():,} parameters is not one: raise it")
    threshold = torch.kthvalue(flat, flat.numel() - count).values
    return {name: score.float() > threshold.to(score.device) for name, score in scores.items()}
