"""Norms of per-unit gradients, computed tile by tile without keeping the gradients, and the choice between the routes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import fastdp._native as _native

from .bounds import PRODUCTS_ROUNDING, ROW_PRODUCTS
from .factors import (
    ABSOLUTE,
    FEW_COLUMNS,
    INT64_MAX,
    MASKED_SQUARE,
    SQUARE,
    accumulator,
    check_group,
    check_mask,
    check_measure,
    check_offsets,
    check_pair,
    has_kernel,
    is_one_hot,
    native_factor,
    native_factors,
    unit_bounds,
)
from .gram import empty_norms, gram_norms
from .matrices import Matrices
from .routes import longest_by_gram
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

    >>> left, right = torch.ones(3, 2), torch.ones(3, 4)  # three tokens
    >>> offsets = torch.tensor([0, 1, 3])  # one of the first unit, two of the second
    >>> abs_sum(left, right, offsets)
    tensor([ 8., 16.])
    """
    return NORMS(left, right, offsets, ABSOLUTE, None)[0]


def masked_sqnorm(left: Tensor, right: Tensor, offsets: Tensor, mask: Tensor) -> Tensor:
    """As `sqnorm`, of the entries where ``mask``, bool [m, n], is True, then of those where it is False: [2, B], in one pass."""
    return NORMS(left, right, offsets, MASKED_SQUARE, mask)


def _direct_norms_reference(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor, known: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    pairs, device = list(zip(lefts, rights)), rights[0].device.type
    squares = torch.stack([NORMS.on(device, *pair, offsets, SQUARE, None)[0].double() for pair in pairs])
    squares[list(known)] = 0
    products, counts = zip(*(ROW_PRODUCTS.on(device, *pair, offsets, 2) for pair in pairs))
    return squares.to(accumulator(*lefts, *rights)), torch.stack(products), torch.stack(counts)


DIRECT_NORMS = Op(
    "direct_norms(Tensor[] lefts, Tensor[] rights, Tensor offsets, int[] known) -> (Tensor, Tensor, Tensor)",
    reference=_direct_norms_reference,
    fake=lambda lefts, rights, offsets, known: (
        *empty_norms(lefts, rights, offsets),
        empty_norms(lefts, rights, offsets)[1],
    ),
    check=lambda lefts, rights, offsets, known: check_group(lefts, rights, offsets),
)
DIRECT_NORMS.implement("cuda", DIRECT_NORMS.reference)


def direct_norms(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor, known: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Squared norms [k, B] of uses by the direct route of `sqnorm`, their `row_products` and their `token_counts`.

    Squared norms of the uses whose numbers are ``known`` are not computed, and are 0.
    """
    squares, products, counts = DIRECT_NORMS(Matrices.of(lefts), Matrices.of(rights), offsets, list(known))
    return squares, products * PRODUCTS_ROUNDING, counts


def sqnorm(left: Tensor, right: Tensor, offsets: Tensor, route: str = "auto") -> Tensor:
    """Squared Frobenius norm of each unit's gradient, without keeping the gradient.

    ``gram`` sums ``(L L^T o R R^T)[t, s]`` over the pairs of tokens of a unit, T^2 (m + n) flop by symmetry;
    ``direct`` squares the gradient tile by tile, 2 T m n flop. One-hot factors take neither: tokens of a unit that
    share an id are added up and squared, one pass over ``right`` whatever the route.

    Args:
        left: [N, m] float32, bfloat16, float16 or float64, any strides; or int64 ids [N].
        right: [N, n], float, any strides.
        offsets: int64 [B + 1], from 0 to N, not decreasing; on the CPU or with the factors. An empty unit has norm 0.
        route: ``gram``, ``direct``, or ``auto`` for the one that is the faster on a processor for units of equal length.

    Returns:
        [B], float32 (float64 if a factor is float64).

    Raises:
        TypeError, ValueError: a dtype, shape, device or offset outside the above.

    Source: Goodfellow 2015 (arXiv 1510.01799) for T = 1; Li et al. 2021 (arXiv 2110.05679), section 4, for sequences.

    >>> left, right = torch.ones(3, 2), torch.ones(3, 4)  # three tokens
    >>> offsets = torch.tensor([0, 1, 3])  # one of the first unit, two of the second
    >>> sqnorm(left, right, offsets)
    tensor([ 8., 32.])
    >>> sqnorm(torch.tensor([5, 7, 7]), right, offsets)  # rows of a table, by id
    tensor([ 4., 16.])
    """
    if route not in ("auto", "gram", "direct"):
        raise ValueError(f"route is '{route}': use one of auto, gram, direct")
    if left.dim() != 2 or right.dim() != 2 or route == "direct":
        return NORMS(left, right, offsets, SQUARE, None)[0]
    longest = longest_by_gram(left.shape[1], right.shape[1]) if route == "auto" else INT64_MAX
    if left.shape[0] <= longest * max(1, len(offsets) - 1):
        return gram_norms([left], [right], [1], offsets)[0][0]
    return NORMS(left, right, offsets, SQUARE, None)[0]


def _chosen_sqnorm_reference(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor, chosen: Tensor
) -> Tensor:
    bounds, dtype = unit_bounds(offsets), accumulator(*lefts, *rights)
    squares = torch.zeros(chosen.shape, dtype=dtype, device=chosen.device)
    for matrix, unit in chosen.nonzero().tolist():
        tokens = slice(bounds[unit], bounds[unit + 1])
        gradient = lefts[matrix][tokens].to(dtype).T @ rights[matrix][tokens].to(dtype)
        squares[matrix, unit] = gradient.square().sum(dtype=torch.float64)
    return squares


def _check_chosen_sqnorm(lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor, chosen: Tensor) -> None:
    check_group(lefts, rights, offsets)
    shape = len(lefts), offsets.shape[0] - 1
    if chosen.dtype != torch.bool or chosen.shape != shape:
        raise ValueError("chosen must be bool, one a matrix and unit")


CHOSEN_SQNORM = Op(
    "chosen_sqnorm(Tensor[] lefts, Tensor[] rights, Tensor offsets, Tensor chosen) -> Tensor",
    reference=_chosen_sqnorm_reference,
    fake=lambda lefts, rights, offsets, chosen: torch.empty_like(chosen, dtype=accumulator(*lefts, *rights)),
    check=_check_chosen_sqnorm,
)
CHOSEN_SQNORM.in_family("bounds")


def chosen_sqnorm(lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor, chosen: Tensor) -> Tensor:
    """Squared norms [k, B] by the direct route of those units of k uses that are ``chosen``, bool [k, B]; 0 for the others.

    On a GPU nothing waits for the choice: one launch serves all, and a unit that was not chosen ends its programs at once.
    """
    return CHOSEN_SQNORM(Matrices.of(lefts), Matrices.of(rights), offsets, chosen)


# On processors: csrc/norms_*.cpp, where the instruction set has kernels and no factor is float64.


def direct_norms_of(left: Tensor, right: Tensor, bounds: list[int], measure: int, mask: Tensor | None = None) -> Tensor:
    """A measure of every entry of the units' gradients: [1, B], or [2, B] under a mask; ``bounds`` of matrices begin anywhere."""
    norms, threads = torch.empty(1 if mask is None else 2, len(bounds) - 1), native_threads()
    mask = None if mask is None else mask.contiguous()
    if is_one_hot(left):
        _native.onehot_norms(left, left.stride(0), native_factor(right), bounds, measure, mask, norms, threads)
        return norms
    if mask is None and _is_faster_transposed(left, right):
        left, right = right, left
    _native.direct_norms(native_factor(left), native_factor(right), bounds, measure, mask, norms, None, threads)
    return norms


def _is_faster_transposed(left: Tensor, right: Tensor) -> bool:
    return right.shape[1] <= FEW_COLUMNS < left.shape[1]


def kept_norms(left: Tensor, right: Tensor, bounds: list[int]) -> tuple[Tensor, Tensor]:
    """The units' gradients [B, m, n] float32, and their squared norms [B], bit by bit those of `direct_norms_of`."""
    transposed, units = _is_faster_transposed(left, right), len(bounds) - 1
    if transposed:
        left, right = right, left
    norms, gradients = torch.empty(1, units), torch.empty(units, left.shape[1], right.shape[1])
    rest = bounds, SQUARE, None, norms, gradients, native_threads()
    _native.direct_norms(native_factor(left), native_factor(right), *rest)
    return (gradients.mT.contiguous() if transposed else gradients), norms[0]


@NORMS.on_cpu
def _norms_on_cpu(left: Tensor, right: Tensor, offsets: Tensor, measure: int, mask: Tensor | None) -> Tensor:
    if not has_kernel(left, right):
        return NotImplemented
    return direct_norms_of(left, right, unit_bounds(offsets), measure, mask)


@DIRECT_NORMS.on_cpu
def _direct_norms_on_cpu(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor, known: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    if not has_kernel(*lefts, *rights):
        return NotImplemented
    bounds, count = unit_bounds(offsets), len(lefts)
    # Each has memory of its own, as a registered op's results must.
    squares = torch.empty(count, len(bounds) - 1)
    products, counts = torch.empty_like(squares, dtype=torch.float64), torch.empty_like(squares, dtype=torch.float64)
    factors, skipped = (native_factors(lefts), native_factors(rights)), [at in known for at in range(count)]
    _native.direct_norms_group(*factors, bounds, skipped, FEW_COLUMNS, squares, products, counts, native_threads())
    return squares, products, counts


@CHOSEN_SQNORM.on_cpu
def _chosen_sqnorm_on_cpu(lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor, chosen: Tensor) -> Tensor:
    if not has_kernel(*rights, *lefts):
        return NotImplemented
    squares = torch.zeros(chosen.shape)
    bounds = unit_bounds(offsets)
    for matrix, unit in chosen.nonzero().tolist():
        own = bounds[unit : unit + 2]
        squares[matrix, unit] = direct_norms_of(lefts[matrix], rights[matrix], own, SQUARE)[0, 0]
    return squares
