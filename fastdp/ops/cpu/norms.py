"""Norms on processors: csrc/norms_*.cpp, where the instruction set has kernels and no factor is float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import fastdp._native as _native

from ..factors import ELEMENT, INT64_MAX, SQUARE, is_one_hot, native_factor, unit_bounds
from ..routes import for_norms
from ..stream import native_threads

NO_FACTOR = (0, 0, 0, 0, 0, 0)
#: Products of at most this many columns are taken transposed, which is faster: a step has LoRA's by the hundred.
NARROW = 32
HAS_KERNELS = _native.isa() != "portable"


def has_kernel(*factors: Tensor) -> bool:
    """Whether the kernels read these factors."""
    for factor in factors:
        if factor.dtype not in ELEMENT and not is_one_hot(factor):
            return False
    return HAS_KERNELS


def _left(left: Tensor) -> tuple[tuple[int, int, int, int, int, int], int, int]:
    if is_one_hot(left):
        return NO_FACTOR, left.data_ptr(), left.stride(0)
    return native_factor(left), 0, 0


def gram_norms_of(
    lefts: Sequence[Tensor],
    right: Tensor,
    bounds: list[int],
    products: Tensor | None = None,
    scales: Sequence[Tensor | None] = (),
    most: int = INT64_MAX,
) -> Tensor:
    """Squared norms [k, B] by Gram matrices; ``products`` is where the row products go as float64 [k, B], if anywhere.

    ``scales`` are of the columns of each left, and of right. Units of more than ``most`` tokens that add anything get 0.
    """
    norms = torch.empty(len(lefts), len(bounds) - 1)
    *own, last = [native_factor(*pair) for pair in zip((*lefts, right), scales or [None] * (len(lefts) + 1))]
    _native.gram_sqnorm(own, last, bounds, most, norms, products, native_threads())
    return norms


def direct_norms(left: Tensor, right: Tensor, bounds: list[int], measure: int, mask: Tensor | None = None) -> Tensor:
    """A measure of every entry of the units' gradients: [1, B], or [2, B] under a mask; ``bounds`` of matrices begin anywhere."""
    norms, threads = torch.empty(1 if mask is None else 2, len(bounds) - 1), native_threads()
    mask = None if mask is None else mask.contiguous()
    if is_one_hot(left):
        _native.onehot_norms(left, left.stride(0), native_factor(right), bounds, measure, mask, norms, threads)
        return norms
    if mask is None and _turned(left, right):
        left, right = right, left
    _native.direct_norms(native_factor(left), native_factor(right), bounds, measure, mask, norms, None, threads)
    return norms


def _turned(left: Tensor, right: Tensor) -> bool:
    return right.shape[1] <= NARROW < left.shape[1]


def kept_norms(left: Tensor, right: Tensor, bounds: list[int]) -> tuple[Tensor, Tensor]:
    """The units' gradients [B, m, n] float32, and their squared norms [B], bit by bit those of `direct_norms`."""
    turned, units = _turned(left, right), len(bounds) - 1
    if turned:
        left, right = right, left
    norms, gradients = torch.empty(1, units), torch.empty(units, left.shape[1], right.shape[1])
    rest = bounds, SQUARE, None, norms, gradients, native_threads()
    _native.direct_norms(native_factor(left), native_factor(right), *rest)
    return (gradients.mT.contiguous() if turned else gradients), norms[0]


def norms(left: Tensor, right: Tensor, offsets: Tensor, route: str, measure: int, mask: Tensor | None) -> Tensor:
    """The norms of :mod:`fastdp.ops.norms` on a processor: [1, B], or [2, B] under a mask."""
    if not has_kernel(left, right):
        return NotImplemented
    bounds = unit_bounds(offsets)
    if not is_one_hot(left) and (for_norms(left, right, bounds) if route == "auto" else route) == "gram":
        return gram_norms_of([left], right, bounds)
    return direct_norms(left, right, bounds, measure, mask)


def cross_inner(
    left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, offsets1: Tensor, offsets2: Tensor
) -> Tensor:
    """:func:`fastdp.ops.cross_inner` on a processor."""
    if not has_kernel(left1, right1, left2, right2):
        return NotImplemented
    bounds1, bounds2 = unit_bounds(offsets1), unit_bounds(offsets2)
    products = torch.empty(len(bounds1) - 1)
    one, two = (_left(left1), native_factor(right1)), (_left(left2), native_factor(right2))
    _native.cross_inner(*one, *two, bounds1, bounds2, products, native_threads())
    return products
