"""Norms and inner products in plain torch, a unit at a time: for processors and dtypes without kernels of their own.

Unlike the definitions these keep no gradient of a unit whole: the Gram route holds T x T for one unit, the direct route
a band of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .factors import accumulator, in_full_precision, is_one_hot, unit_bounds

_BAND = 256  # rows of a gradient at a time on the direct route


def cheaper_route(m: int, n: int, bounds: Sequence[int]) -> str:
    """``gram`` or ``direct``, whichever needs fewer flops when the Gram matrices are not halved by symmetry."""
    tokens = bounds[-1]
    pairs = sum((end - start) ** 2 for start, end in zip(bounds, bounds[1:]))
    return "gram" if pairs * (m + n) <= tokens * m * n else "direct"


def _stack(parts: list[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.stack(parts) if parts else like.new_zeros(0, dtype=dtype)


def gram_sqnorm(lefts: Sequence[Tensor], right: Tensor, bounds: Sequence[int]) -> Tensor:
    """Squared norms [k, B] of uses that share ``right``, by products of Gram matrices."""
    dtype = accumulator(right, *lefts)
    norms = right.new_zeros(len(lefts), len(bounds) - 1, dtype=dtype)
    for unit, (start, end) in enumerate(zip(bounds, bounds[1:])):
        part = right[start:end].to(dtype)
        gram = part @ part.T
        for use, left in enumerate(lefts):
            part = left[start:end].to(dtype)
            norms[use, unit] = torch.mul(part @ part.T, gram).sum().clamp_min_(0)
    return norms


def onehot_parts(
    ids: Tensor, right: Tensor, bounds: Sequence[int], measure: Callable[[Tensor, Tensor], Tensor]
) -> list[Tensor]:
    """``measure(distinct ids, rows)`` for each unit of an embedding: rows with the same id are added up first."""
    dtype = accumulator(right)
    parts = []
    for start, end in zip(bounds, bounds[1:]):
        distinct, group = torch.unique(ids[start:end], return_inverse=True)
        rows = right.new_zeros(len(distinct), right.shape[1], dtype=dtype)
        parts.append(measure(distinct, rows.index_add_(0, group, right[start:end].to(dtype))))
    return parts


def by_bands(
    left: Tensor, right: Tensor, bounds: Sequence[int], measure: Callable[[Tensor, int], Tensor]
) -> list[Tensor]:
    """Sum over bands of rows of ``measure(band, first row)``, for the gradient of each unit."""
    dtype = accumulator(left, right)
    totals = []
    for start, end in zip(bounds, bounds[1:]):
        part = right[start:end].to(dtype)
        bands = [
            measure(left[start:end, row : row + _BAND].to(dtype).T @ part, row)
            for row in range(0, left.shape[1], _BAND)
        ]
        totals.append(torch.stack(bands).sum(0))
    return totals


@in_full_precision
def sqnorm(left: Tensor, right: Tensor, offsets: Tensor, route: str) -> Tensor:
    """:func:`fastdp.ops.sqnorm` in torch."""
    bounds = unit_bounds(offsets)
    if is_one_hot(left):
        return _stack(
            onehot_parts(left, right, bounds, lambda _, rows: rows.square_().sum()), right, accumulator(right)
        )
    if route == "auto":
        route = cheaper_route(left.shape[1], right.shape[1], bounds)
    if route == "gram":
        return gram_sqnorm([left], right, bounds)[0]
    norms = by_bands(left, right, bounds, lambda band, row: band.square().sum())
    return _stack(norms, right, accumulator(left, right))


@in_full_precision
def sqnorm_group(lefts: Sequence[Tensor], right: Tensor, offsets: Tensor) -> Tensor:
    """:func:`fastdp.ops.sqnorm_group` in torch."""
    return gram_sqnorm(lefts, right, unit_bounds(offsets))


def _left_gram(left1: Tensor, left2: Tensor, dtype: torch.dtype) -> Tensor:
    """``<left1[t], left2[s]>`` for all t, s; ids stand for one-hot rows."""
    if is_one_hot(left1) and is_one_hot(left2):
        return (left1[:, None] == left2[None, :]).to(dtype)
    if is_one_hot(left1):
        return left2[:, left1].T.to(dtype)
    if is_one_hot(left2):
        return left1[:, left2].to(dtype)
    return left1.to(dtype) @ left2.to(dtype).T


@in_full_precision
def cross_inner(
    left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, offsets1: Tensor, offsets2: Tensor
) -> Tensor:
    """:func:`fastdp.ops.cross_inner` in torch."""
    bounds1, bounds2 = unit_bounds(offsets1), unit_bounds(offsets2)
    dtype = accumulator(left1, right1, left2, right2)
    products = [
        torch.mul(_left_gram(left1[a:b], left2[c:d], dtype), right1[a:b].to(dtype) @ right2[c:d].to(dtype).T).sum()
        for a, b, c, d in zip(bounds1, bounds1[1:], bounds2, bounds2[1:])
    ]
    return _stack(products, right1, dtype)


@in_full_precision
def abs_sum(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """:func:`fastdp.ops.abs_sum` in torch."""
    bounds = unit_bounds(offsets)
    if is_one_hot(left):
        sums = onehot_parts(left, right, bounds, lambda _, rows: rows.abs_().sum())
    else:
        sums = by_bands(left, right, bounds, lambda band, row: band.abs_().sum())
    return _stack(sums, right, accumulator(left, right))


@in_full_precision
def masked_sqnorm(left: Tensor, right: Tensor, offsets: Tensor, mask: Tensor) -> Tensor:
    """:func:`fastdp.ops.masked_sqnorm` in torch."""

    def measure(entries: Tensor, chosen: Tensor) -> Tensor:
        squares = entries.square_()
        return torch.stack([torch.where(chosen, squares, 0).sum(), torch.where(chosen, 0, squares).sum()])

    bounds = unit_bounds(offsets)
    if is_one_hot(left):
        parts = onehot_parts(left, right, bounds, lambda distinct, rows: measure(rows, mask[distinct]))
    else:
        parts = by_bands(left, right, bounds, lambda band, row: measure(band, mask[row : row + _BAND]))
    if not parts:
        return right.new_zeros(2, 0, dtype=accumulator(left, right))
    return torch.stack(parts, 1)
