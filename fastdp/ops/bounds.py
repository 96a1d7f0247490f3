"""How far rounding may carry a norm, and a unit's part of a sum, from the exact one: what is measured, and the constants.

A unit's gradient is ``sum over t of L_t R_t^T``, and its *products* are ``sum over t of |L_t| |R_t|``. Every rounding error
of the gradient is at most a constant times the products. The constants count the roundings that a term goes through in the
arithmetic that ran; docs/clipping.md derives each of them.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import fastdp._native as _native

from .factors import (
    ELEMENT,
    HAS_KERNELS,
    INT64_MAX,
    NO_FACTOR,
    accumulator,
    check_group,
    check_offsets,
    check_pair,
    has_kernel,
    is_one_hot,
    native_factor,
    native_factors,
    unit_bounds,
)
from .matrices import Matrices
from .placed import CONSTANTS
from .stream import native_threads
from .table import Op

#: What is added to every entry of a row before its norm is taken, as if it were this long: covers what is too small for
#: float32 (csrc/bounds.h has its square).
PADDING = 2.0**-42
#: Entries of a gradient below this may vanish when they are squared or weighted.
FLOOR = 2.0**-50
#: Columns of a row that a Gram kernel adds up in one accumulator of the matrix units (kernels/tiles.py).
CHAIN = 128
#: Columns of a head's tile in one Gram matrix on a GPU: squares of parts add up, and shorter rows are rounded less often.
HEAD_SPAN = 1 << 13
#: Roundings of a chain of fused multiply-adds on a GPU above one a term, or of the steps of a tensor core that truncates. It
#: adds 16 exact products to its accumulator, aligned to the largest with two bits to spare (docs/clipping.md). That costs
#: 17 2^-25 + 2^-23 of the sum of sizes each time, less than 11 units of rounding for 16 terms.
_CHAINED = 11
#: Tokens that the direct route adds up before their sum is added to those before (csrc/block.cpp).
EARLY = 256
#: Units whose weights a GPU's sum goes through at most: of more, several sums are added up.
MOST_UNITS = 256
#: A unit is left out where its norm is more than this many times its bound: its weight would not survive float32.
LARGEST_RATIO = 2.0**40
#: Products are sums of square roots of sums, all of positive terms: whatever their order, this covers their own rounding.
PRODUCTS_ROUNDING = 1 + 2.0**-10
#: A unit whose products are this many times its norm is added on its own: tokens of a unit that are orthogonal to each other
#: have the square root of their number (csrc/bounds.h has it too).
CANCELLING = 2.0**7
# float64 arithmetic on a few thousand numbers, each positive: far below this.
_SLACK = 1 + 2.0**-30


def _row_norms(factor: Tensor, order: int) -> Tensor:
    if is_one_hot(factor):
        return torch.ones(factor.shape[0], dtype=torch.float64, device=factor.device)
    wide, width = factor.double(), factor.shape[1]
    if order == 1:
        return wide.abs().sum(1) + width * PADDING
    return (wide.square().sum(1) + width * PADDING**2).sqrt()


def _row_products_reference(left: Tensor, right: Tensor, offsets: Tensor, order: int) -> tuple[Tensor, Tensor]:
    products = _row_norms(left, order) * _row_norms(right, order)
    bounds = unit_bounds(offsets)
    sums = [products[a:b].sum() for a, b in zip(bounds, bounds[1:])]
    return torch.stack(sums) if sums else products.new_zeros(0), shared_token_counts([left], right, offsets)


def _empty(right: Tensor, offsets: Tensor) -> Tensor:
    """Memory for a number of each unit, float64."""
    return right.new_empty(offsets.shape[0] - 1, dtype=torch.float64)


def _check_row_products(left: Tensor, right: Tensor, offsets: Tensor, order: int) -> None:
    check_pair(left, right)
    check_offsets(offsets, right.shape[0])
    if order not in (1, 2):
        raise ValueError(f"order is {order}: rows have L1 and L2 norms")


ROW_PRODUCTS = Op(
    "row_products(Tensor left, Tensor right, Tensor offsets, int order) -> (Tensor, Tensor)",
    reference=_row_products_reference,
    fake=lambda left, right, offsets, order: (_empty(right, offsets), _empty(right, offsets)),
    check=_check_row_products,
)
ROW_PRODUCTS.in_family("bounds")


def row_products(left: Tensor, right: Tensor, offsets: Tensor, order: int = 2) -> tuple[Tensor, Tensor]:
    """Upper bound of the sum over each unit's tokens of ``|left[t]| |right[t]|``, the scale of its rounding errors: float64 [B].

    And the `token_counts` of the same use, which come for nothing. Each row's norm is raised as if every entry were longer by
    2^-42; a one-hot row has norm 1. Products are not finite where a row is not. ``order`` is of the norms, 1 or 2.
    """
    products, counts = ROW_PRODUCTS(left, right, offsets, order)
    return products * PRODUCTS_ROUNDING, counts


def _adds(lefts: Sequence[Tensor], right: Tensor) -> Tensor:
    """Which tokens add anything, bool [N]: where R and one of the lefts are not zero, or what is zero meets no finite row."""
    rights, good = right.ne(0).any(1), right.isfinite().all(1)
    if not lefts:
        return rights
    some = torch.stack([left.ne(0).any(1) for left in lefts]).any(0)
    sound = torch.stack([left.isfinite().all(1) for left in lefts]).all(0)
    return (some | ~good) & (rights | ~sound)


def shared_token_counts(lefts: Sequence[Tensor], right: Tensor, offsets: Tensor) -> Tensor:
    """Tokens [B], float64, of each unit at which neither ``right`` nor every one of the lefts that read it is zero.

    A row of a table by ids is never zero.
    """
    adds = _adds([left for left in lefts if not is_one_hot(left)], right).double()
    before = torch.cat([adds.new_zeros(1), adds.cumsum(0)])
    return before[offsets.to(before.device)].diff()


TOKEN_COUNTS = Op(
    "token_counts(Tensor[] lefts, Tensor[] rights, Tensor offsets) -> Tensor",
    reference=lambda lefts, rights, offsets: torch.stack(
        [shared_token_counts([left], right, offsets) for left, right in zip(lefts, rights)]
    ),
    fake=lambda lefts, rights, offsets: rights[0].new_empty(len(lefts), offsets.shape[0] - 1, dtype=torch.float64),
    check=check_group,
)
TOKEN_COUNTS.in_family("bounds")


def token_counts(lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor) -> Tensor:
    """How many tokens of each unit add to the gradients of k uses, float64 [k, B]: those at which neither factor is zero.

    Padding adds exact zeros, so a unit's own tokens alone decide how far rounding may carry its norm. Ids are never zero.
    """
    if any(map(is_one_hot, lefts)):
        for left, right in zip(lefts, rights):
            check_pair(left, right)
        lefts = [right if is_one_hot(left) else left for left, right in zip(lefts, rights)]
    return TOKEN_COUNTS(Matrices.of(lefts), Matrices.of(rights), offsets)


class Roundings(NamedTuple):
    """How many roundings a term goes through, by the tokens of its own unit, and the size of one.

    Args:
        fixed: however many tokens there are.
        token: for each of the unit's tokens.
        early: for each of its first 256 besides.
        unit: of rounding.
    """

    fixed: float
    token: float = 0.0
    early: float = 0.0
    unit: float = 2.0**-24

    def plus(self, other: Roundings) -> Roundings:
        """Both, one after the other."""
        fixed, token, early = (a + b for a, b in zip(self[:3], other[:3]))
        return Roundings(fixed, token, early, max(self.unit, other.unit))

    def larger(self, other: Roundings) -> Roundings:
        """At least as many as either."""
        fixed, token, early = (max(a, b) for a, b in zip(self[:3], other[:3]))
        return Roundings(fixed, token, early, max(self.unit, other.unit))

    def gamma(self, tokens: float) -> float:
        """gamma_k of a unit with so many tokens; infinite where k u is so large that nothing is known."""
        error = (self.fixed + self.token * tokens + self.early * min(tokens, EARLY)) * self.unit
        return error / (1 - error) if error < 0.25 else math.inf


class Rounding:
    """The arithmetic of one use: constants gamma (`Roundings`), each times the products (or their square) a bound of an error.

    Take a sum of exact products in which a term goes through at most k additions, each rounded to u. Whatever the order, it
    differs from the exact one by at most gamma_k = k u / (1 - k u) times the sum of the terms' sizes (Higham 2002, section 3.1).

    Args:
        factors: of the use, ids included: their device and dtypes say which arithmetic runs.
        span: columns of a left factor that a Gram matrix on a GPU has at most, but for products of different uses.

    >>> Rounding(torch.ones(3, 2), torch.ones(3, 4)).entry().gamma(100) < 103 * 2**-24
    True
    """

    def __init__(self, *factors: Tensor, span: int = INT64_MAX):
        self.span, self.unit = span, 2.0**-53 if accumulator(*factors) == torch.float64 else 2.0**-24
        device = factors[0].device.type
        if device == "cpu" and HAS_KERNELS and all(f.dtype in ELEMENT or is_one_hot(f) for f in factors):
            self.arithmetic = "cpu"
        elif device == "cuda" and self.unit != 2.0**-53 and importlib.util.find_spec("triton") is not None:
            self.arithmetic = "triton"
        else:
            self.arithmetic = "torch"

    def _dot(self, width: int) -> float:
        """Roundings of a term of an inner product of rows this wide, in a Gram matrix."""
        if self.arithmetic == "cpu":
            lanes = 16 if _native.isa() == "avx512" else 8
            passes = math.ceil(width / 1024)
            return math.ceil(min(width, 1024) / lanes) + 1 + math.log2(lanes) + passes
        if self.arithmetic == "triton":
            return min(width, CHAIN) + _CHAINED + width // CHAIN + 1
        return width + 1

    def gram(self, m: int, n: int, *, crossed: bool = False) -> Roundings:
        """Of a squared norm by Gram matrices, against the square of the products; m is 0 for ids.

        ``crossed``: with the inner products of different uses of one parameter.
        """
        # The products of two entries are added up in float64; on a GPU in float32 within a pair of tiles, and of two uses
        # along a row of them.
        on_gpu = self.arithmetic == "triton"
        token = 1 / 32 if on_gpu and crossed else 0.0
        m = min(m, self.span) if on_gpu and not crossed else m
        return Roundings(self._dot(m) + self._dot(n) + (112 if on_gpu else 4), token, 0.0, self.unit)

    def entry(self) -> Roundings:
        """Of the gradient whose entries the direct route squares, against the products."""
        if self.arithmetic == "cpu":
            # 256 tokens at a time, and one rounding for each time.
            return Roundings(2, 1 / EARLY, 1, self.unit)
        return Roundings(_CHAINED + 1 if self.arithmetic == "triton" else 1, 1, 0, self.unit)

    def added(self) -> Roundings:
        """Of what a unit adds to a weighted sum, against its weight times the products."""
        # The order of a BLAS is not known: any order of the unit's terms has at most this many additions in a row.
        # Two more of the weight times a row and of its product. On a GPU what is held is multiplied by a quotient of two
        # weights where units change: docs/clipping.md.
        return Roundings(24 + 2 * MOST_UNITS if self.arithmetic == "triton" else 3, 1, 0, self.unit)

    def squares(self, entries: int) -> float:
        """Of a sum of this many squares or sizes, against itself, and of adding an instance times its weight."""
        return Roundings(160 + entries / (2**11 if self.arithmetic == "triton" else 2**19), unit=self.unit).gamma(0)


class PartialNorms(NamedTuple):
    """Powers of norms of some parts of the units' gradients, ``[parts, units]`` float32 or float64, and what rounding hides.

    ``products`` and ``tokens`` are those of `row_products`, float64 ``[parts, units]``, or both None.
    """

    powers: Tensor
    products: Tensor | None
    tokens: Tensor | None


def upper_norms(
    parts: Sequence[PartialNorms], groups: Tensor, errors: Tensor, count: int, order: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds of the norm of what each unit adds: that of its computed parts with their errors, and that of what adding hides.

    The parts of a group are one vector, the errors of what is added another: the norm of their sum is at most the sum of
    the two norms.

    Args:
        parts: of all groups, at least one.
        groups: the group of each of their rows, int64.
        errors: float64 ``[9, rows, 1]``. Of each row: what its powers are off by, relative to themselves and at least; what
            adding hides, against its products, besides the last six. These are ``fixed``, ``token`` and ``early`` of two
            `Roundings` each: that of the powers, against products to the power of the order, and that of adding.
        count: of groups.
        order: of the norms, 1 or 2.

    Returns:
        Bounds and computed powers, float64 ``[count, units]``; and of which units the tokens cancel so far that the order of
        their sum matters, bool ``[units]``.
    """
    powers = parts[0].powers
    if powers.device.type != "cpu":
        return upper_norms_reference(parts, groups, errors, count, order)
    units = powers.shape[1]
    norms, measured = torch.empty(2, count, units, dtype=torch.float64)
    cancelling = torch.empty(units, dtype=torch.bool)
    dense = [[None if own is None else own.contiguous() for own in part] for part in parts]
    blocks = [(p, part.powers.dtype == torch.float64, len(part.powers), x, t) for part, (p, x, t) in zip(parts, dense)]
    _native.upper_norms(blocks, groups, errors, len(groups), count, units, order == 2, norms, measured, cancelling)
    return norms, measured, cancelling


def upper_norms_reference(
    parts: Sequence[PartialNorms], groups: Tensor, errors: Tensor, count: int, order: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of `upper_norms`."""
    powers = stack_rows([part.powers for part in parts])
    none = [powers.new_zeros(1, 1).expand_as(part.powers) for part in parts]
    products = stack_rows([zero if own.products is None else own.products for own, zero in zip(parts, none)])
    tokens = stack_rows([zero if own.tokens is None else own.tokens for own, zero in zip(parts, none)])
    measured = powers.new_zeros(count, powers.shape[1]).index_add_(0, groups, powers)
    reach, (relative, least, adding) = products**order, errors[:3]
    of_powers, of_adding = gammas_from_slopes(errors[3:].view(3, 2, -1, 1), tokens)
    highest = measured.index_add(0, groups, powers.abs() * relative + least + reach * of_powers)
    added = torch.zeros_like(measured).index_add_(0, groups, reach * (of_adding + adding) ** order)
    norms = (highest.clamp(min=0) ** (1 / order) + added ** (1 / order)) * _SLACK
    return norms, measured, (products > CANCELLING * norms[groups]).any(0)


def round_down(ratios: Tensor) -> Tensor:
    """Ratios of a bound to a norm, float64 ``[..., units]``, as float32 weights, at most 1 and never rounded up.

    A unit gets 0 in every group if one of its ratios is NaN, or so small that a float32 weight could not carry it: its norm
    is infinite, or beyond 2^40 bounds.
    """
    if ratios.device.type != "cpu":
        return round_down_reference(ratios)
    weights, units = torch.empty(ratios.shape), ratios.shape[-1]
    _native.round_down(ratios.double().contiguous(), ratios.numel() // max(units, 1), units, 1 / LARGEST_RATIO, weights)
    return weights


def round_down_reference(ratios: Tensor) -> Tensor:
    """The definition of `round_down`."""
    kept = (ratios >= 1 / LARGEST_RATIO).reshape(-1, ratios.shape[-1]).all(0)
    return (ratios * (1 - 2.0**-23)).float().clamp_(max=1).masked_fill_(~kept, 0)


def gammas_from_slopes(slopes: Tensor, tokens: Tensor) -> Tensor:
    """`Roundings.gamma` of k parts, given as ``[3, ..., k, 1]``, by the tokens of each unit ``[k, units]``: float64."""
    fixed, token, early = slopes
    errors = fixed + token * tokens + early * tokens.clamp(max=EARLY)
    return torch.where(errors < 0.25, errors / (1 - errors), torch.inf)


def stack_rows(blocks: Sequence[Tensor]) -> Tensor:
    """Blocks of rows as one of float64, ``[rows, units]``; on a GPU in a few launches, however many there are."""
    kinds: dict[torch.dtype, list[int]] = {}
    for at, block in enumerate(blocks):
        kinds.setdefault(block.dtype, []).append(at)
    alike = [torch.cat([blocks[at] for at in members]).double() for members in kinds.values()]
    if len(alike) == 1:
        return alike[0]
    begins = [0, *itertools.accumulate(block.shape[0] for block in blocks)]
    order = [row for members in kinds.values() for at in members for row in range(begins[at], begins[at + 1])]
    places = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(alike).index_select(0, CONSTANTS[tuple(places), torch.int64, blocks[0].device])


# On processors: csrc/bounds.cpp.


@ROW_PRODUCTS.on_cpu
def _row_products_on_cpu(left: Tensor, right: Tensor, offsets: Tensor, order: int) -> tuple[Tensor, Tensor]:
    if not has_kernel(left, right):
        return NotImplemented
    products, counts = (torch.empty(offsets.shape[0] - 1, dtype=torch.float64) for _ in range(2))
    one_hot, bounds = is_one_hot(left), unit_bounds(offsets)
    own = NO_FACTOR if one_hot else native_factor(left)
    _native.row_products(own, native_factor(right), bounds, one_hot, order == 2, products, counts, native_threads())
    return products, counts


@TOKEN_COUNTS.on_cpu
def _token_counts_on_cpu(lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor) -> Tensor:
    if not has_kernel(*rights, *lefts):
        return NotImplemented
    counts, bounds = torch.empty(len(lefts), offsets.shape[0] - 1, dtype=torch.float64), unit_bounds(offsets)
    for own, left, right in zip(counts, native_factors(lefts), native_factors(rights)):
        _native.token_counts(left, right, bounds, own)
    return counts
