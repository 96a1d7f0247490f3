"""Norms of per-unit gradients, whole or under a mask, and inner products of two uses, without the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .factors import (
    accumulator,
    check_offsets,
    check_pair,
    in_full_precision,
    is_one_hot,
    unit_bounds,
    unit_gradient,
)
from .table import Op

ROUTES = ("auto", "gram", "direct")


def table_rows(*lefts: Tensor) -> int | None:
    """Rows that a table must have for these left factors: of the matrix among them, else past the largest id."""
    for left in lefts:
        if not is_one_hot(left):
            return left.shape[1]
    return max((int(left.max()) + 1 for left in lefts if left.numel()), default=0)


def _per_unit_results(results: list[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.stack(results) if results else like.new_zeros(0, dtype=dtype)


@in_full_precision
def _sqnorm_reference(left: Tensor, right: Tensor, offsets: Tensor, route: str) -> Tensor:
    bounds = unit_bounds(offsets)
    rows = table_rows(left)
    norms = [unit_gradient(left, right, a, b, rows).square().sum() for a, b in zip(bounds, bounds[1:])]
    return _per_unit_results(norms, right, accumulator(left, right))


def _sqnorm_fake(left: Tensor, right: Tensor, offsets: Tensor, route: str) -> Tensor:
    return right.new_empty(offsets.shape[0] - 1, dtype=accumulator(left, right))


def _check_sqnorm(left: Tensor, right: Tensor, offsets: Tensor, route: str) -> None:
    check_pair(left, right)
    check_offsets(offsets, right.shape[0], right.device)
    if route not in ROUTES:
        raise ValueError(f"route is '{route}': use one of {', '.join(ROUTES)}")


SQNORM = Op(
    "sqnorm(Tensor left, Tensor right, Tensor offsets, str route) -> Tensor",
    reference=_sqnorm_reference,
    fake=_sqnorm_fake,
    check=_check_sqnorm,
)


def sqnorm(left: Tensor, right: Tensor, offsets: Tensor, route: str = "auto") -> Tensor:
    """Squared Frobenius norm of each unit's gradient, without keeping the gradient.

    ``gram`` sums ``(L L^T o R R^T)[t, s]`` over the pairs of tokens of a unit, T^2 (m + n) flop by symmetry;
    ``direct`` squares the gradient tile by tile, 2 T m n flop. One-hot factors take neither: tokens of a unit that
    share an id are added up and squared, one pass over ``right`` whatever the route.

    Args:
        left: [N, m] float32, bfloat16, float16 or float64, any strides; or int64 ids [N].
        right: [N, n], float, any strides.
        offsets: int64 [B + 1], from 0 to N, not decreasing; on the CPU or with the factors. An empty unit has norm 0.
        route: ``gram``, ``direct``, or ``auto`` for the cheaper by a count of flops.

    Returns:
        [B], float32 (float64 if a factor is float64).

    Raises:
        TypeError, ValueError: a dtype, shape, device or offset outside the above.

    Source: Goodfellow 2015 (arXiv 1510.01799) for T = 1; Li et al. 2021 (arXiv 2110.05679), section 4, for sequences.
    """
    return SQNORM(left, right, offsets, route)


@in_full_precision
def _sqnorm_group_reference(lefts: Sequence[Tensor], right: Tensor, offsets: Tensor) -> Tensor:
    norms = [_sqnorm_reference(left, right, offsets, "auto") for left in lefts]
    return torch.stack([norm.to(accumulator(right, *lefts)) for norm in norms])


def _sqnorm_group_fake(lefts: Sequence[Tensor], right: Tensor, offsets: Tensor) -> Tensor:
    return right.new_empty(len(lefts), offsets.shape[0] - 1, dtype=accumulator(right, *lefts))


def _check_sqnorm_group(lefts: Sequence[Tensor], right: Tensor, offsets: Tensor) -> None:
    if not lefts:
        raise ValueError("lefts is empty: a group has at least one use")
    for number, left in enumerate(lefts):
        check_pair(left, right, (f"lefts[{number}]", "right"))
        if is_one_hot(left):
            raise ValueError(f"lefts[{number}] is a vector of ids: one-hot factors share no Gram matrix, use sqnorm")
    check_offsets(offsets, right.shape[0], right.device)


SQNORM_GROUP = Op(
    "sqnorm_group(Tensor[] lefts, Tensor right, Tensor offsets) -> Tensor",
    reference=_sqnorm_group_reference,
    fake=_sqnorm_group_fake,
    check=_check_sqnorm_group,
)


def sqnorm_group(lefts: Sequence[Tensor], right: Tensor, offsets: Tensor) -> Tensor:
    """Squared norms of several uses that read the same ``right`` (query, key and value projections), by the Gram route.

    The Gram matrix of ``right`` is computed once for the whole group.

    Args:
        lefts: k matrices [N, m_i], float, any strides.
        right: [N, n], float, any strides.
        offsets: int64 [B + 1], as in :func:`sqnorm`.

    Returns:
        [k, B], float32 (float64 if a factor is float64).

    Raises:
        TypeError, ValueError: an empty group, ids among the lefts, or what :func:`sqnorm` refuses.
    """
    return SQNORM_GROUP(list(lefts), right, offsets)


@in_full_precision
def _cross_inner_reference(
    left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, offsets1: Tensor, offsets2: Tensor
) -> Tensor:
    bounds1, bounds2 = unit_bounds(offsets1), unit_bounds(offsets2)
    rows = table_rows(left1, left2)
    dtype = accumulator(left1, right1, left2, right2)
    products = [
        (unit_gradient(left1, right1, a, b, rows).to(dtype) * unit_gradient(left2, right2, c, d, rows)).sum()
        for a, b, c, d in zip(bounds1, bounds1[1:], bounds2, bounds2[1:])
    ]
    return _per_unit_results(products, right1, dtype)


def _cross_inner_fake(
    left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, offsets1: Tensor, offsets2: Tensor
) -> Tensor:
    return right1.new_empty(offsets1.shape[0] - 1, dtype=accumulator(left1, right1, left2, right2))


def _check_cross_inner(
    left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, offsets1: Tensor, offsets2: Tensor
) -> None:
    check_pair(left1, right1, ("left1", "right1"))
    check_pair(left2, right2, ("left2", "right2"))
    if right1.shape[1] != right2.shape[1]:
        raise ValueError(f"right1 is {right1.shape[1]} wide and right2 {right2.shape[1]}: two uses of one matrix agree")
    if not is_one_hot(left1) and not is_one_hot(left2) and left1.shape[1] != left2.shape[1]:
        raise ValueError(f"left1 is {left1.shape[1]} wide and left2 {left2.shape[1]}: two uses of one matrix agree")
    if right1.device != right2.device:
        raise ValueError(f"right1 is on {right1.device} and right2 on {right2.device}")
    check_offsets(offsets1, right1.shape[0], right1.device, "offsets1")
    check_offsets(offsets2, right2.shape[0], right2.device, "offsets2")
    if offsets1.shape != offsets2.shape:
        raise ValueError(f"offsets1 cut {offsets1.shape[0] - 1} units and offsets2 {offsets2.shape[0] - 1}")
    for ids, other, names in ((left1, left2, ("left1", "left2")), (left2, left1, ("left2", "left1"))):
        if is_one_hot(ids) and not is_one_hot(other):
            check_ids(ids, other.shape[1], names[0])


def check_ids(ids: Tensor, rows: int | None, name: str = "left") -> None:
    """Raise ValueError for an id below 0 or not below ``rows``; only on the CPU, where looking costs no wait."""
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    least, most = (int(bound) for bound in torch.aminmax(ids))
    if least < 0 or (rows is not None and most >= rows):
        bad = least if least < 0 else most
        raise ValueError(
            f"{name} has id {bad}: ids run from 0 to {'the rows of the table' if rows is None else rows - 1}"
        )


CROSS_INNER = Op(
    "cross_inner(Tensor left1, Tensor right1, Tensor left2, Tensor right2, Tensor offsets1, Tensor offsets2) -> Tensor",
    reference=_cross_inner_reference,
    fake=_cross_inner_fake,
    check=_check_cross_inner,
)


def cross_inner(
    left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, offsets1: Tensor, offsets2: Tensor
) -> Tensor:
    """Inner product of the gradients that two uses of one matrix give each unit (tied weights).

    The sum over tokens t of use 1 and s of use 2, in the unit, of ``<left1[t], left2[s]> <right1[t], right2[s]>``.

    Args:
        left1, left2: [N1, m] and [N2, m] float, or int64 ids; an id against a matrix picks the matrix's column.
        right1, right2: [N1, n] and [N2, n], float, any strides.
        offsets1, offsets2: int64 [B + 1] each, as in :func:`sqnorm`; the same B units.

    Returns:
        [B], float32 (float64 if a factor is float64).

    Raises:
        TypeError, ValueError: factors of different matrices, ids outside the table, or what :func:`sqnorm` refuses.
    """
    return CROSS_INNER(left1, right1, left2, right2, offsets1, offsets2)


def check_mask(mask: Tensor, left: Tensor, right: Tensor) -> None:
    """Raise TypeError or ValueError unless there is one bool an entry of the gradient, beside the factors."""
    if mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}: it must be bool")
    rows = mask.shape[0] if is_one_hot(left) and mask.dim() == 2 else left.shape[-1]
    if mask.shape != (rows, right.shape[1]):
        raise ValueError(f"mask has shape {tuple(mask.shape)}: the gradient has {(rows, right.shape[1])}")
    if mask.device != right.device:
        raise ValueError(f"mask is on {mask.device} and the factors on {right.device}")
    if is_one_hot(left):
        check_ids(left, mask.shape[0])


@in_full_precision
def _abs_sum_reference(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    bounds = unit_bounds(offsets)
    rows = table_rows(left)
    sums = [unit_gradient(left, right, a, b, rows).abs().sum() for a, b in zip(bounds, bounds[1:])]
    return torch.stack(sums) if sums else _abs_sum_fake(left, right, offsets)


def _abs_sum_fake(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    return right.new_empty(offsets.shape[0] - 1, dtype=accumulator(left, right))


def _check_abs_sum(left: Tensor, right: Tensor, offsets: Tensor) -> None:
    check_pair(left, right)
    check_offsets(offsets, right.shape[0], right.device)


ABS_SUM = Op(
    "abs_sum(Tensor left, Tensor right, Tensor offsets) -> Tensor",
    reference=_abs_sum_reference,
    fake=_abs_sum_fake,
    check=_check_abs_sum,
)


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
    """
    return ABS_SUM(left, right, offsets)


@in_full_precision
def _masked_sqnorm_reference(left: Tensor, right: Tensor, offsets: Tensor, mask: Tensor) -> Tensor:
    bounds = unit_bounds(offsets)
    result = torch.zeros_like(_masked_sqnorm_fake(left, right, offsets, mask))
    for unit, (start, end) in enumerate(zip(bounds, bounds[1:])):
        squares = unit_gradient(left, right, start, end, mask.shape[0]).square()
        result[0, unit] = torch.where(mask, squares, 0).sum()
        result[1, unit] = torch.where(mask, 0, squares).sum()
    return result


def _masked_sqnorm_fake(left: Tensor, right: Tensor, offsets: Tensor, mask: Tensor) -> Tensor:
    return right.new_empty(2, offsets.shape[0] - 1, dtype=accumulator(left, right))


def check_masked_sqnorm(left: Tensor, right: Tensor, offsets: Tensor, mask: Tensor) -> None:
    check_pair(left, right)
    check_offsets(offsets, right.shape[0], right.device)
    check_mask(mask, left, right)


MASKED_SQNORM = Op(
    "masked_sqnorm(Tensor left, Tensor right, Tensor offsets, Tensor mask) -> Tensor",
    reference=_masked_sqnorm_reference,
    fake=_masked_sqnorm_fake,
    check=check_masked_sqnorm,
)


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
    """
    return MASKED_SQNORM(left, right, offsets, mask)
