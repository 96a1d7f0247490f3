"""What rounding is measured by, on processors: csrc/bounds.cpp, or as a by-product of the Gram matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import fastdp._native as _native

from ..factors import SQUARE, is_one_hot, native_factor, native_factors, unit_bounds
from ..stream import native_threads
from .norms import NARROW, NO_FACTOR, direct_norms as norms_of, gram_norms_of, has_kernel


def row_products(left: Tensor, right: Tensor, offsets: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """:func:`fastdp.ops.row_products` on a processor."""
    if not has_kernel(left, right):
        return NotImplemented
    products = torch.empty(offsets.shape[0] - 1, dtype=torch.float64)
    one_hot, counts = is_one_hot(left), token_counts([left], right, offsets)
    own, bounds = NO_FACTOR if one_hot else native_factor(left), unit_bounds(offsets)
    _native.row_products(own, native_factor(right), bounds, one_hot, order == 2, products, native_threads())
    return products, counts


def token_counts(lefts: Sequence[Tensor], right: Tensor, offsets: Tensor) -> Tensor:
    """:func:`fastdp.ops.token_counts` on a processor."""
    if not has_kernel(right, *lefts):
        return NotImplemented
    counts = torch.empty(offsets.shape[0] - 1, dtype=torch.float64)
    own = [native_factor(left) for left in lefts if not is_one_hot(left)]
    _native.token_counts(own, native_factor(right), unit_bounds(offsets), counts)
    return counts


def gram_norms(
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    counts: Sequence[int],
    offsets: Tensor,
    scales: Sequence[Tensor],
    most: int,
) -> tuple[Tensor, Tensor]:
    """:func:`fastdp.ops.gram_norms` on a processor: a group after another."""
    if not has_kernel(*rights, *lefts):
        return NotImplemented
    bounds = unit_bounds(offsets)
    products = torch.empty(len(lefts), len(bounds) - 1, dtype=torch.float64)
    squares, first = [], 0
    scales = [scale.contiguous() for scale in scales]
    for group, (right, count) in enumerate(zip(rights, counts)):
        own = slice(first, first + count)
        by = (*scales[own], scales[len(lefts) + group]) if scales else ()
        squares.append(gram_norms_of(lefts[own], right, bounds, products[own], by, most))
        first += count
    return squares[0] if len(squares) == 1 else torch.cat(squares), products


def direct_norms(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor, known: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`fastdp.ops.direct_norms` on a processor: one matrix after another."""
    if not has_kernel(*lefts, *rights):
        return NotImplemented
    bounds, threads = unit_bounds(offsets), native_threads()
    shape = len(lefts), len(bounds) - 1
    # Each has memory of its own, as a registered op's results must.
    squares, products, counts = torch.zeros(shape), *(torch.empty(shape, dtype=torch.float64) for _ in range(2))
    for at, (left, right) in enumerate(zip(native_factors(lefts), native_factors(rights))):
        if at not in known:
            pair = (right, left) if right[2] <= NARROW < left[2] else (left, right)
            _native.direct_norms(*pair, bounds, SQUARE, None, squares[at : at + 1], None, threads)
        _native.row_products(left, right, bounds, False, True, products[at], threads)
        _native.token_counts([left], right, bounds, counts[at])
    return squares, products, counts


def chosen_sqnorm(lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor, chosen: Tensor) -> Tensor:
    """:func:`fastdp.ops.chosen_sqnorm` on a processor."""
    if not has_kernel(*rights, *lefts):
        return NotImplemented
    squares = torch.zeros(chosen.shape)
    bounds = unit_bounds(offsets)
    for matrix, unit in chosen.nonzero().tolist():
        own = bounds[unit : unit + 2]
        squares[matrix, unit] = norms_of(lefts[matrix], rights[matrix], own, SQUARE)[0, 0]
    return squares
