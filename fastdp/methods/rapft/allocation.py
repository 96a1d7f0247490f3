"""Bounds and noise of the two blocks, and the policies that follow: the printed shape and the optimal one.

A mask splits the trained coordinates into a weak block w and a strong block s, with n_w and n_s coordinates and the
fractions r_w = n_w / (n_w + n_s) and r_s = 1 - r_w. Equations are those of Wang et al., "Balancing differential privacy
and utility" (IEEE TIFS 2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from fastdp.engine.clip.policy import Policy
from fastdp.validate import at_least

WEAK, STRONG = 0, 1
ALLOCATIONS = ("printed", "optimal", "axes")


def _check_fraction(weak_fraction: float) -> float:
    fraction = float(weak_fraction)
    if not 0 < fraction < 1:
        raise ValueError(
            f"the weak block holds a fraction {fraction:g} of the coordinates and the strong one {1 - fraction:g}: both "
            "must be above 0; change the irrelevance ratio"
        )
    return fraction


def shape_factor(weak_fraction: float) -> float:
    """sqrt(r_w^3 + r_s^3), by which the printed noise exceeds what its multiplier needs; in [1/2, 1)."""
    r = _check_fraction(weak_fraction)
    return math.sqrt(r**3 + (1 - r) ** 3)


def effective_noise_multiplier(noise_multiplier: float, weak_fraction: float) -> float:
    """The multiplier of the one Gaussian mechanism that the printed algorithm is, for a fixed mask.

    Blocks clipped to C r^2 (equation 21) with noise of std sigma C sqrt(r) (equation 22, whose "rac" is a lost fraction)
    have, divided each by its own std, sensitivity sqrt(sum r_k^4 / (sigma^2 r_k)) = sqrt(r_w^3 + r_s^3) / sigma.
    """
    at_least(0, noise_multiplier=noise_multiplier)
    return noise_multiplier / shape_factor(weak_fraction)


def printed_noise_multiplier(noise_multiplier: float, weak_fraction: float) -> float:
    """The sigma of equation 22 at which the printed algorithm has ``noise_multiplier`` in truth; inverse of the above."""
    return noise_multiplier * shape_factor(weak_fraction)


def printed_bounds(max_grad_norm: float, weak_fraction: float) -> tuple[float, float]:
    """C r_w^2 and C r_s^2 (equation 21). Raises ValueError for a fraction outside (0, 1)."""
    r = _check_fraction(weak_fraction)
    return max_grad_norm * r**2, max_grad_norm * (1 - r) ** 2


def optimal_stds(noise_multiplier: float, bounds: Sequence[float], sizes: Sequence[float]) -> tuple[float, ...]:
    """The noise of least variance sum n_k s_k^2 at a multiplier sigma, for bounds C_k and sizes n_k (or their proportions).

    Under sum (C_k / s_k)^2 = 1 / sigma^2 it is s_k^2 = sigma^2 C_k / sqrt(n_k) sum_j C_j sqrt(n_j) (Lagrange: n_k s_k^4 is
    proportional to C_k^2).
    """
    roots = [math.sqrt(n) for n in sizes]
    total = sum(c * root for c, root in zip(bounds, roots))
    return tuple(noise_multiplier * math.sqrt(c / root * total) for c, root in zip(bounds, roots))


def weak_fraction(masks: Mapping[str, torch.Tensor]) -> float:
    """r_w of a mask (True is weak), over all trained coordinates. Raises ValueError if either block is empty."""
    weak = sum(int(mask.sum()) for mask in masks.values())
    return _check_fraction(weak / sum(mask.numel() for mask in masks.values()))


def masked_policy(
    masks: Mapping[str, torch.Tensor], *, allocation: str, max_grad_norm: float, noise_multiplier: float
) -> Policy:
    """The policy of two blocks, whose multiplier is ``noise_multiplier`` exactly, ``printed`` or ``optimal``.

    The mask of a trained parameter is a boolean tensor of its shape, True where it is weak.
    """
    r = weak_fraction(masks)
    bounds = printed_bounds(max_grad_norm, r)
    sigma = printed_noise_multiplier(noise_multiplier, r)
    stds: tuple[float, ...] = (sigma * max_grad_norm * math.sqrt(r), sigma * max_grad_norm * math.sqrt(1 - r))
    if allocation == "optimal":
        stds = optimal_stds(noise_multiplier, bounds, (r, 1 - r))
    groups = {name: _group(mask) for name, mask in masks.items()}
    return Policy(bounds, stds, groups, {name: mask for name, mask in masks.items() if isinstance(groups[name], tuple)})


def _group(mask: torch.Tensor) -> int | tuple[int, int]:
    weak = int(mask.sum())
    if weak == mask.numel():
        return WEAK
    return STRONG if weak == 0 else (WEAK, STRONG)
