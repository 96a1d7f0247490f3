"""Norms of per-unit gradients, whole or under a mask, and inner products of two uses, without keeping the gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import fastdp._native as _native

from .factors import (
    ABSOLUTE,
    FEW_COLUMNS,
    MASKED_SQUARE,
    NO_FACTOR,
    SQUARE,
    accumulator,
    check_ids,
    check_mask,
    check_measure,
    check_offsets,
    check_pair,
    has_kernel,
    is_one_hot,
    native_factor,
    unit_bounds,
)
from .stream import native_threads
from .table import Op

_BAND = 256  # rows of a gradient that the definitions hold at a time


def _bands(left: Tensor, right: Tensor, start: int, end: int) -> Iterator[tuple[Tensor | slice, Tensor]]:
    """The gradient of the unit that owns tokens ``start .. end``, some rows at a time, with which they are.

    Of a table, only the rows that the unit has ids of.
    """
    dtype = accumulator(left, right)
    part = right[start:end].to(dtype)
    if is_one_hot(left):
        distinct, group = torch.unique(left[start:end], return_inverse=True)
        yield distinct, part.new_zeros(len(distinct), part.shape[1]).index_add_(0, group, part)
        return
    for first in range(0, left.shape[1], _BAND):
        rows = slice(first, first + _BAND)
        yield rows, left[start:end, rows].to(dtype).T @ part


def _measured(entries: Tensor, measure: int, chosen: Tensor | None) -> Tensor:
    # In float64: torch does not say in which order it adds, and of millions of terms float32 could promise nothing.
    if measure == ABSOLUTE:
        return entries.abs().sum(dtype=torch.float64)
    squares = entries.square()
    if chosen is None:
        return squares.sum(dtype=torch.float64)
    parts = torch.where(chosen, squares, 0), torch.where(chosen, 0, squares)
    return torch.stack([part.sum(dtype=torch.float64) for part in parts])


def _norms_reference(left: Tensor, right: Tensor, offsets: Tensor, measure: int, mask: Tensor | None) -> Tensor:
    bounds, made = unit_bounds(offsets), _norms_fake(left, right, offsets, measure, mask)
    norms = torch.zeros_like(made, dtype=torch.float64)
    for unit, (start, end) in enumerate(zip(bounds, bounds[1:])):
        for rows, entries in _bands(left, right, start, end):
            norms[:, unit] += _measured(entries, measure, None if mask is None else mask[rows])
    return norms.to(made.dtype)


def _norms_fake(left: Tensor, right: Tensor, offsets: Tensor, measure: int, mask: Tensor | None) -> Tensor:
    return right.new_empty(1 if mask is None else 2, offsets.shape[0] - 1, dtype=accumulator(left, right))


def _check_norms(left: Tensor, right: Tensor, offsets: Tensor, measure: int, mask: Tensor | None) -> None:
    check_pair(left, right)
    check_offsets(offsets, right.shape[0])
    check_measure(measure, mask)
    if mask is not None:
        check_mask(mask, left, right)


NORMS = Op(
    "norms(Tensor left, Tensor right, Tensor offsets, int measure, Tensor? mask) -> Tensor",
    reference=_norms_reference,
    fake=_norms_fake,
    check=_check_norms,
)
NORMS.in_family("norms")


def abs_sum(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """L1 norm of each unit's gradient, tile by tile: DP-FROST's partition norms.

    Args:
        left: [N, m], float, any strides; or int64 ids [N], whose tokens add up within a unit before they are measured.
        right: [N, n], float, any strides.
        offsets: int64 [B + 1], from 0 to N, not decreasing; on the CPU or with the factors.

    Returns:
        [B], float32 (float64 if a factor is float64); 0 for empty units.

    Raises:
        TypeError, ValueError: a dtype, shape, device or offset outside the above.

    >>> import torch
    >>> from fastdp.ops import abs_sum
    >>> left, right = torch.ones(3, 2), torch.ones(3, 4)  # three tokens
    >>> offsets = torch.tensor([0, 1, 3])  # one of the first unit, two of the second
    >>> abs_sum(left, right, offsets)
    tensor([ 8., 16.])
    """
    return NORMS(left, right, offsets, ABSOLUTE, None)[0]


def masked_sqnorm(left: Tensor, right: Tensor, offsets: Tensor, mask: Tensor) -> Tensor:
    """Squared norms of the masked and of the unmasked part of each unit's gradient, in one pass over its tiles.

    Args:
        left: [N, m], float, any strides; or int64 ids [N] of rows of a table, the mask's.
        right: [N, n], float, any strides.
        offsets: int64 [B + 1], from 0 to N, not decreasing; on the CPU or with the factors.
        mask: bool [m, n].

    Returns:
        [2, B]: where ``mask`` is True, then where it is False; float32 (float64 if a factor is float64).

    Raises:
        TypeError, ValueError: a dtype, shape, device or offset outside the above.

    >>> import torch
    >>> from fastdp.ops import masked_sqnorm
    >>> left, right = torch.ones(3, 2), torch.ones(3, 4)  # three tokens
    >>> offsets = torch.tensor([0, 1, 3])  # one of the first unit, two of the second
    >>> mask = torch.tensor([[True], [False]]).expand(2, 4).contiguous()
    >>> masked_sqnorm(left, right, offsets, mask)
    tensor([[ 4., 16.],
            [ 4., 16.]])
    """
    return NORMS(left, right, offsets, MASKED_SQUARE, mask)


def _left_gram(left1: Tensor, left2: Tensor, dtype: torch.dtype) -> Tensor:
    """``<left1[t], left2[s]>`` for all t, s; ids stand for one-hot rows."""
    if is_one_hot(left1) and is_one_hot(left2):
        return (left1[:, None] == left2[None, :]).to(dtype)
    if is_one_hot(left1):
        return left2[:, left1].T.to(dtype)
    if is_one_hot(left2):
        return left1[:, left2].to(dtype)
    return left1.to(dtype) @ left2.to(dtype).T


def _cross_reference(
    left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, offsets1: Tensor, offsets2: Tensor
) -> Tensor:
    bounds1, bounds2 = unit_bounds(offsets1), unit_bounds(offsets2)
    products = torch.zeros_like(_cross_fake(left1, right1, left2, right2, offsets1, offsets2))
    dtype = products.dtype
    for unit, (a, b, c, d) in enumerate(zip(bounds1, bounds1[1:], bounds2, bounds2[1:])):
        rights = right1[a:b].to(dtype) @ right2[c:d].to(dtype).T
        products[unit] = torch.mul(_left_gram(left1[a:b], left2[c:d], dtype), rights).sum(dtype=torch.float64)
    return products


def _cross_fake(
    left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, offsets1: Tensor, offsets2: Tensor
) -> Tensor:
    return right1.new_empty(offsets1.shape[0] - 1, dtype=accumulator(left1, right1, left2, right2))


def _check_cross(
    left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, offsets1: Tensor, offsets2: Tensor
) -> None:
    check_pair(left1, right1, ("left1", "right1"))
    check_pair(left2, right2, ("left2", "right2"))
    if right1.shape[1] != right2.shape[1]:
        raise ValueError(f"right1 is {right1.shape[1]} wide and right2 {right2.shape[1]}: two uses of one matrix agree")
    if not is_one_hot(left1) and not is_one_hot(left2) and left1.shape[1] != left2.shape[1]:
        raise ValueError(f"left1 is {left1.shape[1]} wide and left2 {left2.shape[1]}: two uses of one matrix agree")
    check_offsets(offsets1, right1.shape[0], "offsets1")
    check_offsets(offsets2, right2.shape[0], "offsets2")
    if offsets1.shape != offsets2.shape:
        raise ValueError(f"offsets1 cut {offsets1.shape[0] - 1} units and offsets2 {offsets2.shape[0] - 1}")
    for ids, other, name in ((left1, left2, "left1"), (left2, left1, "left2")):
        if is_one_hot(ids) and not is_one_hot(other):
            check_ids(ids, other.shape[1], name)


CROSS_INNER = Op(
    "cross_inner(Tensor left1, Tensor right1, Tensor left2, Tensor right2, Tensor offsets1, Tensor offsets2) -> Tensor",
    reference=_cross_reference,
    fake=_cross_fake,
    check=_check_cross,
)
CROSS_INNER.in_family("norms")


def cross_inner(
    left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, offsets1: Tensor, offsets2: Tensor
) -> Tensor:
    """Inner product of the gradients that two uses of one matrix give each unit (tied weights).

    The sum over tokens t of use 1 and s of use 2, in the unit, of ``<left1[t], left2[s]> <right1[t], right2[s]>``.

    Args:
        left1, left2: [N1, m] and [N2, m] float, or int64 ids; an id against a matrix picks the matrix's column.
        right1, right2: [N1, n] and [N2, n], float, any strides.
        offsets1, offsets2: int64 [B + 1] each, as in :func:`fastdp.ops.sqnorm`; the same B units.

    Returns:
        [B], float32 (float64 if a factor is float64).

    Raises:
        TypeError, ValueError: factors of different matrices, ids outside the table, or what :func:`fastdp.ops.sqnorm` refuses.

    >>> import torch
    >>> from fastdp.ops import cross_inner
    >>> left, right = torch.ones(3, 2), torch.ones(3, 4)  # three tokens
    >>> offsets = torch.tensor([0, 1, 3])  # one of the first unit, two of the second
    >>> cross_inner(left, right, 2 * left, right, offsets, offsets)
    tensor([16., 64.])
    """
    return CROSS_INNER(left1, right1, left2, right2, offsets1, offsets2)


# On processors: csrc/norms_*.cpp, where the instruction set has kernels and no factor is float64.


def _left(left: Tensor) -> tuple[tuple[int, int, int, int, int, int], int, int]:
    if is_one_hot(left):
        return NO_FACTOR, left.data_ptr(), left.stride(0)
    return native_factor(left), 0, 0


def direct_norms_of(left: Tensor, right: Tensor, bounds: list[int], measure: int, mask: Tensor | None = None) -> Tensor:
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
    return right.shape[1] <= FEW_COLUMNS < left.shape[1]


def kept_norms(left: Tensor, right: Tensor, bounds: list[int]) -> tuple[Tensor, Tensor]:
    """The units' gradients [B, m, n] float32, and their squared norms [B], bit by bit those of `direct_norms_of`."""
    turned, units = _turned(left, right), len(bounds) - 1
    if turned:
        left, right = right, left
    norms, gradients = torch.empty(1, units), torch.empty(units, left.shape[1], right.shape[1])
    rest = bounds, SQUARE, None, norms, gradients, native_threads()
    _native.direct_norms(native_factor(left), native_factor(right), *rest)
    return (gradients.mT.contiguous() if turned else gradients), norms[0]


@NORMS.on_cpu
def _norms_on_cpu(left: Tensor, right: Tensor, offsets: Tensor, measure: int, mask: Tensor | None) -> Tensor:
    """The norms of :mod:`fastdp.ops.norms` on a processor: [1, B], or [2, B] under a mask."""
    if not has_kernel(left, right):
        return NotImplemented
    return direct_norms_of(left, right, unit_bounds(offsets), measure, mask)


@CROSS_INNER.on_cpu
def _cross_inner_on_cpu(
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
