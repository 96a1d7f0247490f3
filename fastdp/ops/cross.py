"""Inner products of the per-unit gradients of two uses of one matrix, such as a table that is a head as well."""

from __future__ import annotations

import torch
from torch import Tensor

import fastdp._native as _native

from .factors import (
    NO_FACTOR,
    accumulator,
    check_ids,
    check_offsets,
    check_pair,
    has_kernel,
    is_one_hot,
    native_factor,
    unit_bounds,
)
from .stream import native_threads
from .table import Op


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
        offsets1, offsets2: int64 [B + 1] each, as in `fastdp.ops.sqnorm`; the same B units.

    Returns:
        [B], float32 (float64 if a factor is float64).

    Raises:
        TypeError, ValueError: factors of different matrices, ids outside the table, or what `fastdp.ops.sqnorm` refuses.

    >>> left, right = torch.ones(3, 2), torch.ones(3, 4)  # three tokens
    >>> offsets = torch.tensor([0, 1, 3])  # one of the first unit, two of the second
    >>> cross_inner(left, right, 2 * left, right, offsets, offsets)
    tensor([16., 64.])
    """
    return CROSS_INNER(left1, right1, left2, right2, offsets1, offsets2)


def _left(left: Tensor) -> tuple[tuple[int, int, int, int, int], int, int]:
    if is_one_hot(left):
        return NO_FACTOR, left.data_ptr(), left.stride(0)
    return native_factor(left), 0, 0


@CROSS_INNER.on_cpu
def _cross_inner_on_cpu(
    left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, offsets1: Tensor, offsets2: Tensor
) -> Tensor:
    if not has_kernel(left1, right1, left2, right2):
        return NotImplemented
    bounds1, bounds2 = unit_bounds(offsets1), unit_bounds(offsets2)
    products = torch.empty(len(bounds1) - 1)
    one, two = (_left(left1), native_factor(right1)), (_left(left2), native_factor(right2))
    _native.cross_inner(*one, *two, bounds1, bounds2, products, native_threads())
    return products
