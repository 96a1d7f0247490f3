"""Instantiated gradients on processors, for contiguous float32: csrc/instances.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import fastdp._native as _native
from fastdp.ops.factors import SQUARE
from fastdp.ops.instances import INSTANCE_NORMS, INSTANCE_SUM
from fastdp.ops.stream import native_threads

from .norms import HAS_KERNELS


def _served(instances: Tensor) -> bool:
    return HAS_KERNELS and instances.dtype == torch.float32 and instances.is_contiguous()


def instance_norms(instances: Tensor, measure: int, mask: Tensor | None) -> Tensor:
    """The norms of :mod:`fastdp.ops.instances` on a processor: [1, B], or [2, B] under a mask."""
    if not _served(instances):
        return NotImplemented
    units, mask = instances.shape[0], None if mask is None else mask.contiguous()
    norms = torch.empty(1 if mask is None else 2, units)
    size = instances.numel() // max(1, units)
    _native.instance_norms(instances, units, size, measure, mask, norms, native_threads())
    return norms


def instance_sum(instances: Tensor, weights: Tensor, weights_unmasked: Tensor | None, mask: Tensor | None) -> Tensor:
    """The sums of :mod:`fastdp.ops.instances` on a processor."""
    if not (_served(instances) and weights.dtype == torch.float32):
        return NotImplemented
    if mask is None or weights_unmasked is None:
        return _sum(instances, weights)
    if weights_unmasked.dtype != torch.float32:
        return NotImplemented
    total = torch.empty([*instances.shape[1:]])
    both = weights.contiguous(), weights_unmasked.contiguous()
    given = instances, instances.shape[0], total.numel(), *both, mask.contiguous()
    _native.instance_masked_sum(*given, total, native_threads())
    return total


def _sum(instances: Tensor, weights: Tensor) -> Tensor:
    """The sum of instances that are served, by float32 weights."""
    total = torch.empty([*instances.shape[1:]])
    size = total.numel()
    _native.instance_sum(instances, instances.shape[0], size, weights.contiguous(), total, native_threads())
    return total


def instance_norms_group(instances: Sequence[Tensor]) -> Tensor:
    """The norms of several parameters' gradients on a processor, one after another."""
    return torch.stack([INSTANCE_NORMS.on("cpu", x, SQUARE, None)[0] for x in instances])


def instance_sum_group(instances: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """The sums of several parameters' gradients on a processor, one after another."""
    if all(map(_served, instances)) and weights.dtype == torch.float32:
        return list(map(_sum, instances, weights.unbind()))
    return [INSTANCE_SUM.on("cpu", x, row, None, None) for x, row in zip(instances, weights)]
