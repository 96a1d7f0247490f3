"""Norms on processors: the C++ kernels of csrc/ where the instruction set has one, torch otherwise and for float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

import fastdp._native as _native

from .. import torch_norms
from ..factors import ELEMENT, is_one_hot, native_factor, unit_bounds
from ..norms import ABS_SUM, CROSS_INNER, MASKED_SQNORM, SQNORM, SQNORM_GROUP

_NO_FACTOR = (0, 0, 0, 0, 0)
SQUARE, ABSOLUTE, MASKED_SQUARE = range(3)  # as csrc/block.h numbers them
HAS_KERNELS = _native.isa() != "portable"

# The Gram kernel does T^2 (m + n) flop and the direct one 2 T m n, at rates that differ by this from 16 tokens on.
_GRAM_RATE_OVER_DIRECT = 0.95

_packed_masks: Any = WeakIdKeyDictionary()


def served(*factors: Tensor) -> bool:
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
    if not served(left, right):
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
    if not served(right, *lefts):
        return torch_norms.sqnorm_group(lefts, right, offsets)
    return _gram(lefts, right, unit_bounds(offsets))


@CROSS_INNER.implement("cpu")
def cross_inner(
    left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, offsets1: Tensor, offsets2: Tensor
) -> Tensor:
    """:func:`fastdp.ops.cross_inner` on a processor."""
    if not served(left1, right1, left2, right2):
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
    if not served(left, right):
        return torch_norms.abs_sum(left, right, offsets)
    return _by_entries(left, right, unit_bounds(offsets), ABSOLUTE)[0]


@MASKED_SQNORM.implement("cpu")
def masked_sqnorm(left: Tensor, right: Tensor, offsets: Tensor, mask: Tensor) -> Tensor:
    """:func:`fastdp.ops.masked_sqnorm` on a processor."""
    if not served(left, right):
        return torch_norms.masked_sqnorm(left, right, offsets, mask)
    bits = packed(mask)
    return _by_entries(left, right, unit_bounds(offsets), MASKED_SQUARE, bits.ctypes.data)
