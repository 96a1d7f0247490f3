"""What noise along axes can gain, from gradients as they are: a measure of a method's ceiling, without any privacy.

Adam divides a coordinate by the size of what it sees, which is its noise where noise dominates. Where every example is
clipped too, a step along axes s takes sum(m^2 / s) / sqrt(sum(M / s^2)) off the loss, to first order and but for constants, with
M = E g^2 by coordinate and m the mean gradient, while noise moves every coordinate as far as without axes. By Cauchy and
Schwarz that is at most sqrt(sum(m^4 / M)), at s = M / m^2; without axes it is sum(m^2) / sqrt(sum(M)).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdp.engine.boundary import find_loss


class Known(NamedTuple):
    """Of single examples' gradients: means of their squares, and the squared mean over either half of them, without bias."""

    squares: Tensor
    halves: tuple[Tensor, Tensor]

    @property
    def common(self) -> Tensor:
        """The squared mean gradient, of both halves."""
        return (self.halves[0] + self.halves[1]) / 2


def known(model: torch.nn.Module, batches: Iterable[Mapping[str, Any]]) -> dict[str, Known]:
    """By trained parameter, float64 of its shape; each batch is one example, and there are at least four."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros(4, *p.shape, dtype=torch.float64, device=p.device) for name, p in trained.items()}
    counts = [0, 0]
    for number, batch in enumerate(batches):
        half = number % 2
        counts[half] += 1
        loss = find_loss(model(**batch))
        assert loss is not None
        for name, gradient in zip(trained, torch.autograd.grad(loss, list(trained.values()))):
            sums[name][half] += gradient
            sums[name][2 + half] += gradient.double().square()
    first, second = (count * (count - 1) for count in counts)
    return {
        name: Known(
            (own[2] + own[3]) / sum(counts),
            ((own[0].square() - own[2]) / first, (own[1].square() - own[3]) / second),
        )
        for name, own in sums.items()
    }


def gain(found: Mapping[str, Known], axes: Mapping[str, Tensor]) -> dict[str, float]:
    """Signal over noise along ``axes``, tensors that broadcast to the parameters', over that without; the most that any axes
    of as many numbers give it; and the share of the gradients' energy that examples have in common.
    """
    sums = torch.zeros(5, dtype=torch.float64)
    for name, own in found.items():
        s = axes[name].double()
        # One number for a whole parameter is one coordinate of its own.
        whole = s.numel() == 1
        energy, (first, second) = (
            (own.squares.sum(), [half.sum() for half in own.halves]) if whole else (own.squares, own.halves)
        )
        parts = (
            energy,
            energy / s**2,
            (first + second) / 2,
            (first + second) / 2 / s,
            first * second / energy.clamp_min(1e-30),
        )
        sums += torch.stack([part.sum() for part in parts]).cpu()
    energy, scaled, signal, kept, agreed = sums.tolist()
    return {
        "signal_over_noise": kept / signal * (energy / scaled) ** 0.5,
        "most": (max(agreed, 0.0) * energy) ** 0.5 / signal,
        "in_common": signal / energy,
    }
