"""A captured use of a matrix as a pair of factors, and the arithmetic of its units' gradients without making them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

import fastdp.ops as ops
from fastdp.engine.uses.layout import Layout


@dataclass(slots=True)
class Factors:
    """One captured use: ``left`` [N, m] (or ids [N] of a one-hot factor) and ``right`` [N, n], over flat tokens.

    ``laned`` says that tokens come in equal blocks a lane rather than a row (they differ when rows are packed), and
    ``swap`` that the parameter is stored as [n, m], as HF's Conv1D does. ``own_offsets`` say where units begin among tokens that
    the data selected, which no layout knows.
    """

    left: torch.Tensor
    right: torch.Tensor
    laned: bool = False
    swap: bool = False
    own_offsets: torch.Tensor | None = None

    #: Whether ``left`` is made tile by tile, as a head's is (`fastdp.engine.rules.head.HeadFactors`), and norms came with it.
    tiled: ClassVar[bool] = False
    #: Whether its norms are `powers`, and no other kernel's.
    finds_norms: ClassVar[bool] = False

    @property
    def one_hot(self) -> bool:
        return self.left.dim() == 1

    @property
    def width(self) -> int:
        """Columns of the left factor; 0 of ids, which have none."""
        return 0 if self.one_hot else self.left.shape[1]

    @property
    def sides(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The factor of the parameter's first dimension, and that of the others."""
        return (self.right, self.left) if self.swap else (self.left, self.right)

    def moved(self, first: torch.Tensor, second: torch.Tensor, *, turned: bool = False) -> Factors:
        """Factors of another matrix, in its order, that were made from these; ``turned`` says that their order changed.

        ``left`` stays the factor that is backpropagated.
        """
        swap = self.swap != turned
        left, right = (second, first) if swap else (first, second)
        return replace(self, left=left, right=right, swap=swap)

    @property
    def unswapped(self) -> Factors:
        """The same gradient in the order of the parameter."""
        if not self.swap:
            return self
        left, right = self.sides
        return replace(self, left=left, right=right, swap=False)

    def product(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Tokens ``[N, n]`` times a matrix ``[n, m]``."""
        return x @ matrix.to(x.dtype)

    def dense(self) -> Factors:
        """The same with both factors in memory."""
        return self

    def times(self, left: torch.Tensor, right: torch.Tensor) -> Factors:
        """New factors, with columns multiplied, in float32 at least: of ids the rows of the other factor."""
        if self.one_hot:
            return replace(self, right=(self.right * left[self.left].unsqueeze(1)).mul_(right))
        return replace(self, left=self.left * left, right=self.right * right)

    def offsets(self, layout: Layout, *, host: bool = False) -> torch.Tensor:
        """Where units begin on the axis of tokens, int64 ``[units + 1]``; on the ``host``, or beside the factors."""
        if self.own_offsets is not None:
            return self.own_offsets.cpu() if host else self.own_offsets
        return layout.offsets(self.right.shape[0], laned=self.laned, host=host)

    def by_unit(self, sizes: torch.Tensor, order: float = 1) -> torch.Tensor:
        """The norm of this order, by unit, of numbers for each pair of `offsets`."""
        return sizes

    def lengths(self, layout: Layout) -> torch.Tensor:
        """Tokens of each unit that add anything, so that padding is none: float64 ``[units]``."""
        return self.by_unit(ops.token_counts([self.left], [self.right], self.offsets(layout))[0], math.inf)

    def scales_of_errors(self, layout: Layout, order: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        """`row_products` and `lengths`, at once."""
        products, tokens = ops.row_products(self.left, self.right, self.offsets(layout), order)
        return self.by_unit(products, order), self.by_unit(tokens, math.inf)

    def rounding(self) -> ops.Rounding:
        """The arithmetic of its products."""
        return ops.Rounding(self.left, self.right)

    def row_products(self, layout: Layout, order: int = 2) -> torch.Tensor:
        """The scale of a unit's rounding errors, ``[units]`` float64: see `fastdp.ops.row_products`."""
        return self.by_unit(ops.row_products(self.left, self.right, self.offsets(layout), order)[0], order)

    def powers(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Computed squared norms (by Gram matrices, or from a table's rows), and the `row_products`: ``[units]`` each."""
        if self.one_hot:
            return ops.sqnorm(self.left, self.right, self.offsets(layout)), self.row_products(layout)
        squares, products = ops.gram_norms([self.left], [self.right], [1], self.offsets(layout))
        return squares[0], products[0]

    @property
    def imprecise(self) -> torch.Tensor:
        """Which units `powers` found by the direct route, as Gram matrices are imprecise: bool ``[units]``, or one for all."""
        return torch.zeros((), dtype=torch.bool, device=self.right.device)

    def inner(self, other: Factors, layout: Layout) -> torch.Tensor:
        """Inner products with the units' gradients of another use of the matrix, both unswapped and the other not tiled."""
        offsets = self.offsets(layout), other.offsets(layout)
        return ops.cross_inner(self.left, self.right, other.left, other.right, *offsets)

    def add_to(self, total: torch.Tensor | None, weights: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Add the units' gradients by ``weights`` ``[units]`` to ``total`` ``[m, n]``, and return it.

        Without a total one is made, but for one that is not dense.
        """
        return ops.weighted_sum(*self.sides, weights, total, offsets=self.offsets(layout))

    def unit_to(self, total: torch.Tensor, unit: int, offsets: Sequence[int]) -> None:
        """Add one unit's gradient to ``total``; ``offsets`` are on the host."""
        tokens = slice(offsets[unit], offsets[unit + 1])
        left, right = replace(self, left=self.left[tokens], right=self.right[tokens]).sides
        if self.one_hot:
            ops.weighted_sum(left, right, torch.ones(right.shape[0], device=right.device), total)
        else:
            total += ops.per_unit(left, right, torch.tensor([0, right.shape[0]]))[0]

    def each(self, layout: Layout) -> torch.Tensor:
        """Every unit's gradient, ``[units, m, n]`` float32, not of ids: wide ones in products that the host cuts."""
        return ops.per_unit(*self.dense().sides, self.offsets(layout, host=True))

    def each_to(self, totals: torch.Tensor, layout: Layout) -> None:
        """Add every unit's gradient to its own of ``totals`` ``[units, m, n]``."""
        if not self.one_hot:
            totals += self.each(layout)
            return
        offsets = self.offsets(layout).tolist()
        for unit, total in enumerate(totals):
            self.unit_to(total, unit, offsets)


def join_uses(uses: list[Factors], layout: Layout) -> list[Factors]:
    """Join uses of one kind and length along each unit's tokens, so that k uses need one Gram and not k^2 cross terms."""
    first = uses[0]
    kinds = {(use.tiled, use.one_hot, use.swap, use.laned, use.right.shape) for use in uses}
    by_row = layout.token_segments is None and first.own_offsets is None and not first.tiled
    if len(uses) < 2 or len(kinds) > 1 or not by_row:
        return uses

    def join(parts: list[torch.Tensor]) -> torch.Tensor:
        blocks = [p.reshape(layout.lanes, -1, *p.shape[1:]) for p in parts]
        return torch.cat(blocks, dim=1).flatten(0, 1)

    return [replace(first, left=join([u.left for u in uses]), right=join([u.right for u in uses]))]


class PerUnit:
    """The gradients of one parameter, unit by unit, from all of its uses in a micro-batch; one at a time is in memory."""

    def __init__(self, uses: Sequence[Factors], instance: torch.Tensor | None, layout: Layout, shape: torch.Size):
        self.uses = [(use, use.offsets(layout).tolist()) for use in uses]
        self.instance, self.shape, self.device = instance, shape, layout.weights.device

    def __getitem__(self, unit: int) -> torch.Tensor:
        """The gradient of one unit, float32 in the parameter's shape, newly made."""
        total = torch.zeros(self.shape, device=self.device)
        if self.instance is not None:
            total += self.instance[unit].reshape(self.shape)
        for use, offsets in self.uses:
            use.unit_to(total.view(total.shape[0], -1), unit, offsets)
        return total
