"""Instantiated gradients on processors: csrc/instances.cpp, for contiguous float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import fastdp._native as _native
from fastdp.ops.factors import SQUARE
from fastdp.ops.instances import INSTANCE_NORMS, INSTANCE_SUM

from .norms import HAS_KERNELS, packed


def _served(instances: Tensor) -> bool:
    return HAS_KERNELS and instances.dtype == torch.float32 and instances.is_contiguous()


def instance_norms(instances: Tensor, measure: int, mask: Tensor | None) -> Tensor:
    """The norms of :mod:`fastdp.ops.instances` on a processor: [1, B], or [2, B] under a mask."""
    if not _served(instances):
        return NotImplemented
    units, bits = instances.shape[0], None if mask is None else packed(mask, flat=True)
    norms = torch.empty(1 if mask is None else 2, units)
    size = instances.numel() // max(1, units)
    _native.instance_norms(instances, units, size, measure, bits, norms, torch.get_num_threads())
    return norms


def instance_sum(instances: Tensor, weights: Tensor, weights_unmasked: Tensor | None, mask: Tensor | None) -> Tensor:
    """The sums of :mod:`fastdp.ops.instances` on a processor."""
    if weights_unmasked is None:
        weights_unmasked = weights
    if not (_served(instances) and weights.dtype == weights_unmasked.dtype == torch.float32):
        return NotImplemented
    total = torch.empty(instances.shape[1:])
    both = weights.contiguous(), weights_unmasked.contiguous()
    bits = None if mask is None else packed(mask, flat=True)
    _native.instance_sum(instances, instances.shape[0], total.numel(), *both, bits, total, torch.get_num_threads())
    return total


def instance_norms_group(instances: Sequence[Tensor]) -> Tensor:
    """The norms of several parameters' gradients on a processor, one after another."""
    return torch.stack([INSTANCE_NORMS.on("cpu", x, SQUARE, None)[0] for x in instances])


def instance_sum_group(instances: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """The sums of several parameters' gradients on a processor, one after another."""
    return [INSTANCE_SUM.on("cpu", x, row, None, None) for x, row in zip(instances, weights)]
