"""Norms on processors: the C++ kernels of csrc/ where the instruction set has one, torch otherwise and for float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

import fastdp._native as _native

from . import torch_norms
from .entries import (
    ABS_SUM,
    MASKED_SQNORM,
    MASKED_WEIGHTED_SUM,
    MASKED_WEIGHTED_SUM_INPLACE,
)
from .factors import ELEMENT, accumulator, is_one_hot, native_factor, unit_bounds
from .norms import CROSS_INNER, SQNORM, SQNORM_GROUP

_NO_FACTOR = (0, 0, 0, 0, 0)
SQUARE, ABSOLUTE, MASKED_SQUARE = range(3)  # as csrc/outer_block.h numbers them
HAS_KERNELS = _native.isa() != "portable"

# The Gram kernel does T^2 (m + n) flop and the direct one 2 T m n, at rates that differ by this from 16 tokens on.
_GRAM_RATE_OVER_DIRECT = 0.95

_packed_masks: Any = WeakIdKeyDictionary()


def _served(*factors: Tensor) -> bool:
    """Whether the kernels read these factors."""
    return HAS_KERNELS and all(f.dtype in ELEMENT or is_one_hot(f) for f in factors)


def _left(left: Tensor) -> tuple[tuple[int, int, int, int, int], int, int]:
    if is_one_hot(left):
        return _NO_FACTOR, left.data_ptr(), left.stride(0)
    return native_factor(left), 0, 0


def packed(mask: Tensor, *, flat: bool = False) -> np.ndarray:
    """The bits of a mask [m, n], each row padded to words of 64; kept for as long as the mask lives unchanged.

    ``flat`` takes a mask of any shape as one row.
    """
    known = _packed_masks.get(mask)
    if known is None or known[0] != mask._version:
        known = _packed_masks[mask] = (mask._version, {})
    if flat not in known[1]:
        rows = mask.reshape(1, -1) if flat else mask
        m, n = rows.shape
        words = np.zeros((m, (n + 63) // 64 * 8), dtype=np.uint8)
        words[:, : (n + 7) // 8] = np.packbits(rows.numpy(), axis=1, bitorder="little")
        known[1][flat] = words
    return known[1][flat]


def _cheaper_route(m: int, n: int, bounds: Sequence[int]) -> str:
    pairs = sum((end - start) ** 2 for start, end in zip(bounds, bounds[1:]))
    return "gram" if pairs * (m + n) <= _GRAM_RATE_OVER_DIRECT * 2 * bounds[-1] * m * n else "direct"


def _gram(lefts: Sequence[Tensor], right: Tensor, bounds: list[int]) -> Tensor:
    norms = torch.empty(len(lefts), len(bounds) - 1)
    _native.gram_sqnorm(
        [native_factor(left) for left in lefts], native_factor(right), bounds, norms.data_ptr(), torch.get_num_threads()
    )
    return norms


def _direct(left: Tensor, right: Tensor, bounds: list[int], measure: int, mask: int = 0) -> Tensor:
    norms = torch.empty(2 if measure == MASKED_SQUARE else 1, len(bounds) - 1)
    _native.direct_norms(
        native_factor(left), native_factor(right), bounds, measure, mask, norms.data_ptr(), torch.get_num_threads()
    )
    return norms


def _onehot(ids: Tensor, right: Tensor, bounds: list[int], measure: int, mask: int = 0) -> Tensor:
    norms = torch.empty(2 if measure == MASKED_SQUARE else 1, len(bounds) - 1)
    _native.onehot_norms(
        ids.data_ptr(),
        ids.stride(0),
        native_factor(right),
        bounds,
        measure,
        mask,
        norms.data_ptr(),
        torch.get_num_threads(),
    )
    return norms


def _by_entries(left: Tensor, right: Tensor, bounds: list[int], measure: int, mask: int = 0) -> Tensor:
    """By looking at each entry: of the gradient's tiles, or of the rows that a table's gradient consists of."""
    return (_onehot if is_one_hot(left) else _direct)(left, right, bounds, measure, mask)


@SQNORM.implement("cpu")
def sqnorm(left: Tensor, right: Tensor, offsets: Tensor, route: str) -> Tensor:
    """:func:`fastdp.ops.sqnorm` on a processor."""
    if not _served(left, right):
        return torch_norms.sqnorm(left, right, offsets, route)
    bounds = unit_bounds(offsets)
    if is_one_hot(left):
        return _onehot(left, right, bounds, SQUARE)[0]
    if route == "auto":
        route = _cheaper_route(left.shape[1], right.shape[1], bounds)
    if route == "gram":
        return _gram([left], right, bounds)[0]
    return _direct(left, right, bounds, SQUARE)[0]


@SQNORM_GROUP.implement("cpu")
def sqnorm_group(lefts: Sequence[Tensor], right: Tensor, offsets: Tensor) -> Tensor:
    """:func:`fastdp.ops.sqnorm_group` on a processor."""
    if not _served(right, *lefts):
        return torch_norms.sqnorm_group(lefts, right, offsets)
    return _gram(lefts, right, unit_bounds(offsets))


@CROSS_INNER.implement("cpu")
def cross_inner(
    left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, offsets1: Tensor, offsets2: Tensor
) -> Tensor:
    """:func:`fastdp.ops.cross_inner` on a processor."""
    if not _served(left1, right1, left2, right2):
        return torch_norms.cross_inner(left1, right1, left2, right2, offsets1, offsets2)
    bounds1, bounds2 = unit_bounds(offsets1), unit_bounds(offsets2)
    products = torch.empty(len(bounds1) - 1)
    _native.cross_inner(
        _left(left1),
        native_factor(right1),
        _left(left2),
        native_factor(right2),
        bounds1,
        bounds2,
        products.data_ptr(),
        torch.get_num_threads(),
    )
    return products


@ABS_SUM.implement("cpu")
def abs_sum(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """:func:`fastdp.ops.abs_sum` on a processor."""
    if not _served(left, right):
        return torch_norms.abs_sum(left, right, offsets)
    return _by_entries(left, right, unit_bounds(offsets), ABSOLUTE)[0]


@MASKED_SQNORM.implement("cpu")
def masked_sqnorm(left: Tensor, right: Tensor, offsets: Tensor, mask: Tensor) -> Tensor:
    """:func:`fastdp.ops.masked_sqnorm` on a processor."""
    if not _served(left, right):
        return torch_norms.masked_sqnorm(left, right, offsets, mask)
    bits = packed(mask)
    return _by_entries(left, right, unit_bounds(offsets), MASKED_SQUARE, bits.ctypes.data)


def _runs(*weights: Tensor) -> list[int]:
    """Bounds of the runs of tokens over which every one of these weights stays the same."""
    if weights[0].shape[0] == 0:
        return [0]
    change = weights[0][1:] != weights[0][:-1]
    for other in weights[1:]:
        change |= other[1:] != other[:-1]
    return [0, *(change.nonzero()[:, 0] + 1).tolist(), weights[0].shape[0]]


@MASKED_WEIGHTED_SUM_INPLACE.implement("cpu")
def masked_weighted_sum_(
    out: Tensor, left: Tensor, right: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor
) -> None:
    """``fastdp.ops.masked_weighted_sum(..., out=out)`` on a processor."""
    if not (_served(left, right) and out.dtype == torch.float32 and out.stride(1) == 1):
        MASKED_WEIGHTED_SUM_INPLACE.reference(out, left, right, weights_masked, weights_unmasked, mask)
    elif is_one_hot(left):
        _onehot_masked_sum(out, left, right, weights_masked.float(), weights_unmasked.float(), mask)
    else:
        _runs_masked_sum(out, left, right, weights_masked, weights_unmasked, mask)


def _onehot_masked_sum(
    out: Tensor, ids: Tensor, right: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor
) -> None:
    masked, unmasked, bits = weights_masked.contiguous(), weights_unmasked.contiguous(), packed(mask)
    _native.onehot_masked_add(
        ids.data_ptr(),
        ids.stride(0),
        native_factor(right),
        right.shape[0],
        masked.data_ptr(),
        unmasked.data_ptr(),
        bits.ctypes.data,
        out.data_ptr(),
        out.stride(0),
        torch.get_num_threads(),
    )


def _runs_masked_sum(
    out: Tensor, left: Tensor, right: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor
) -> None:
    bounds = _runs(weights_masked, weights_unmasked)
    if len(bounds) - 1 > right.shape[0] // 8:
        MASKED_WEIGHTED_SUM_INPLACE.reference(out, left, right, weights_masked, weights_unmasked, mask)
        return
    first = torch.tensor(bounds[:-1], dtype=torch.int64)
    bits = packed(mask)
    _native.masked_weighted_sum(
        native_factor(left),
        native_factor(right),
        bounds,
        weights_masked[first].tolist(),
        weights_unmasked[first].tolist(),
        bits.ctypes.data,
        out.data_ptr(),
        out.stride(0),
        torch.get_num_threads(),
    )


@MASKED_WEIGHTED_SUM.implement("cpu")
def masked_weighted_sum(
    left: Tensor, right: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor
) -> Tensor:
    """:func:`fastdp.ops.masked_weighted_sum` on a processor."""
    out = right.new_zeros(mask.shape, dtype=accumulator(left, right))
    masked_weighted_sum_(out, left, right, weights_masked, weights_unmasked, mask)
    return out
