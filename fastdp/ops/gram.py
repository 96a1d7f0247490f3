"""Squared norms of per-unit gradients by Gram matrices of the tokens (the ghost norm), without keeping the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import fastdp._native as _native

from .bounds import PRODUCTS_ROUNDING, ROW_PRODUCTS, shared_token_counts
from .factors import INT64_MAX, accumulator, check_group, has_kernel, native_factor, native_factors, unit_bounds
from .matrices import Matrices
from .stream import native_threads
from .table import Op


def empty_norms(lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for squared norms and products of uses, ``[uses, units]`` each."""
    squares = rights[0].new_empty(len(lefts), offsets.shape[0] - 1, dtype=accumulator(*rights, *lefts))
    return squares, torch.empty_like(squares, dtype=torch.float64)


def _gram_squares(left: Tensor, right: Tensor, bounds: Sequence[int]) -> Tensor:
    squares = right.new_zeros(len(bounds) - 1, dtype=torch.float64)
    for unit, tokens in enumerate(map(slice, bounds, bounds[1:])):
        one, two = (factor[tokens].to(accumulator(left, right)) for factor in (left, right))
        squares[unit] = torch.mul(one @ one.T, two @ two.T).sum(dtype=torch.float64).clamp_min_(0)
    return squares


def _gram_norms_reference(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], counts: Sequence[int], offsets: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    pairs = list(zip(lefts, [right for right, count in zip(rights, counts) for _ in range(count)]))
    squares = [_gram_squares(left, right, unit_bounds(offsets)) for left, right in pairs]
    products = [ROW_PRODUCTS.reference(left, right, offsets, 2)[0] for left, right in pairs]
    found, sizes = torch.stack(squares).to(accumulator(*rights, *lefts)), torch.stack(products)
    if most < INT64_MAX:
        first = 0
        for right, count in zip(rights, counts):
            long = shared_token_counts(lefts[first : first + count], right, offsets) > most
            for part in (found, sizes):
                part[first : first + count].masked_fill_(long, 0)
            first += count
    return found, sizes


def _check_gram_norms(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], counts: Sequence[int], offsets: Tensor, most: int
) -> None:
    if len(rights) != len(counts) or not rights or sum(counts) != len(lefts):
        raise ValueError(f"{len(lefts)} lefts in groups of {list(counts)} do not belong to {len(rights)} rights")
    if min(counts) < 1:
        raise ValueError("lefts is empty: a group has at least one use")
    check_group(lefts, rights, offsets, counts)


GRAM_NORMS = Op(
    "gram_norms(Tensor[] lefts, Tensor[] rights, int[] counts, Tensor offsets, int most) -> (Tensor, Tensor)",
    reference=_gram_norms_reference,
    fake=lambda lefts, rights, counts, offsets, *_: empty_norms(lefts, rights, offsets),
    check=_check_gram_norms,
)
GRAM_NORMS.in_family("bounds")


def gram_norms(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], counts: Sequence[int], offsets: Tensor, most: int = INT64_MAX
) -> tuple[Tensor, Tensor]:
    """Squared norms [k, B] of uses by the Gram route of `fastdp.ops.sqnorm`, and the `row_products` of each.

    Uses that read the same right factor (query, key and value projections) stand together, ``counts`` of them for each of the
    rights: its Gram matrix is computed once. Units of more than ``most`` tokens, as `shared_token_counts` has them, get 0 for
    both, as the direct route is the faster one for them.
    """
    squares, products = GRAM_NORMS(Matrices.of(lefts), Matrices.of(rights), list(counts), offsets, most)
    return squares, products * PRODUCTS_ROUNDING


def _gram_norms_of(
    lefts: Sequence[Tensor],
    right: Tensor,
    bounds: list[int],
    products: Tensor | None = None,
    counts: Tensor | None = None,
    most: int = INT64_MAX,
) -> Tensor:
    """Squared norms [k, B] by Gram matrices.

    ``products`` is where the row products go as float64 [k, B], and ``counts`` where those of tokens do, [B], if anywhere.
    Units of more than ``most`` tokens that add anything get 0.
    """
    norms = torch.empty(len(lefts), len(bounds) - 1)
    _native.gram_sqnorm(
        native_factors(lefts), native_factor(right), bounds, most, norms, products, counts, native_threads()
    )
    return norms


def counted_gram_norms(
    lefts: Sequence[Tensor], right: Tensor, offsets: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`gram_norms` of uses that read one right, and the `shared_token_counts` of all: on a processor from one look."""
    if right.device.type != "cpu" or not has_kernel(right, *lefts):
        norms = gram_norms(lefts, [right], [len(lefts)], offsets, most)
        return *norms, shared_token_counts(lefts, right, offsets)
    _check_gram_norms(lefts, [right], [len(lefts)], offsets, most)
    shape = len(lefts), offsets.shape[0] - 1
    products, counts = torch.empty(shape, dtype=torch.float64), torch.empty(shape[1], dtype=torch.float64)
    squares = _gram_norms_of(lefts, right, unit_bounds(offsets), products, counts, most)
    return squares, products.mul_(PRODUCTS_ROUNDING), counts


@GRAM_NORMS.on_cpu
def _gram_norms_on_cpu(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], counts: Sequence[int], offsets: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    if not has_kernel(*rights, *lefts):
        return NotImplemented
    bounds, first = unit_bounds(offsets), 0
    squares = torch.empty(len(lefts), len(bounds) - 1)
    products = torch.empty_like(squares, dtype=torch.float64)
    for right, count in zip(rights, counts):
        own = slice(first, first + count)
        squares[own] = _gram_norms_of(lefts[own], right, bounds, products[own], None, most)
        first += count
    return squares, products
