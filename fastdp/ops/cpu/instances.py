"""Instantiated gradients on processors: csrc/instances.cpp for contiguous float32, torch for the rest."""

from __future__ import annotations

import torch
from torch import Tensor

import fastdp._native as _native

from ..instances import INSTANCE_ABS_SUM, INSTANCE_MASKED_SQNORM, INSTANCE_MASKED_SUM, INSTANCE_SQNORM, INSTANCE_SUM
from .norms import ABSOLUTE, HAS_KERNELS, MASKED_SQUARE, SQUARE, packed


def _served(instances: Tensor, *weights: Tensor) -> bool:
    if not HAS_KERNELS or not instances.is_contiguous():
        return False
    return all(x.dtype == torch.float32 for x in (instances, *weights))


def _norms(instances: Tensor, measure: int, mask: int = 0) -> Tensor:
    units = instances.shape[0]
    norms = torch.empty(2 if measure == MASKED_SQUARE else 1, units)
    _native.instance_norms(
        instances.data_ptr(),
        units,
        instances.numel() // max(1, units),
        measure,
        mask,
        norms.data_ptr(),
        torch.get_num_threads(),
    )
    return norms


def _sum(instances: Tensor, masked: Tensor, unmasked: Tensor, mask: int = 0) -> Tensor:
    total = torch.empty(instances.shape[1:])
    masked, unmasked = masked.contiguous(), unmasked.contiguous()
    _native.instance_sum(
        instances.data_ptr(),
        instances.shape[0],
        total.numel(),
        masked.data_ptr(),
        unmasked.data_ptr(),
        mask,
        total.data_ptr(),
        torch.get_num_threads(),
    )
    return total


@INSTANCE_SQNORM.implement("cpu")
def instance_sqnorm(instances: Tensor) -> Tensor:
    """:func:`fastdp.ops.instance_sqnorm` on a processor."""
    if not _served(instances):
        return INSTANCE_SQNORM.reference(instances)
    return _norms(instances, SQUARE)[0]


@INSTANCE_ABS_SUM.implement("cpu")
def instance_abs_sum(instances: Tensor) -> Tensor:
    """:func:`fastdp.ops.instance_abs_sum` on a processor."""
    if not _served(instances):
        return INSTANCE_ABS_SUM.reference(instances)
    return _norms(instances, ABSOLUTE)[0]


@INSTANCE_MASKED_SQNORM.implement("cpu")
def instance_masked_sqnorm(instances: Tensor, mask: Tensor) -> Tensor:
    """:func:`fastdp.ops.instance_masked_sqnorm` on a processor."""
    if not _served(instances):
        return INSTANCE_MASKED_SQNORM.reference(instances, mask)
    bits = packed(mask, flat=True)
    return _norms(instances, MASKED_SQUARE, bits.ctypes.data)


@INSTANCE_SUM.implement("cpu")
def instance_sum(instances: Tensor, weights: Tensor) -> Tensor:
    """:func:`fastdp.ops.instance_sum` on a processor."""
    if not _served(instances, weights):
        return INSTANCE_SUM.reference(instances, weights)
    return _sum(instances, weights, weights)


@INSTANCE_MASKED_SUM.implement("cpu")
def instance_masked_sum(instances: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor) -> Tensor:
    """:func:`fastdp.ops.instance_masked_sum` on a processor."""
    if not _served(instances, weights_masked, weights_unmasked):
        return INSTANCE_MASKED_SUM.reference(instances, weights_masked, weights_unmasked, mask)
    bits = packed(mask, flat=True)
    return _sum(instances, weights_masked, weights_unmasked, bits.ctypes.data)
