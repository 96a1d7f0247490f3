"""Uses of a stack of matrices, each by tokens that the data choose, as a mixture of experts has them.

The gradient of a unit is a stack again: of each matrix the sum over its own tokens of L_t R_t^T. Tokens lie by matrix and
then by unit, so that one matrix and one unit have a run of them, and what an op makes of runs adds up to that of units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import fastdp.ops as ops
from fastdp.engine.bounds import REMEASURED, gammas
from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.uses.factors import Factors
from fastdp.engine.uses.layout import Layout
from fastdp.ops.factors import INT64_MAX
from fastdp.ops.routes import NARROW, longest_by_gram


@dataclass(slots=True)
class ExpertFactors(Factors):
    """Factors of a stack of ``count`` matrices; ``own_offsets`` ``[count * units + 1]`` say where runs begin."""

    count: int = 1
    imprecise: torch.Tensor = None  # type: ignore[assignment]

    stacked: ClassVar[bool] = True

    @classmethod
    def of_tokens(
        cls, left: torch.Tensor, right: torch.Tensor, runs: torch.Tensor, count: int, units: int, **kind: Any
    ) -> Any:
        """Those of tokens in any order, of which ``runs`` has the matrix times the number of units, plus the unit."""
        own, order = runs.sort(stable=True)
        offsets = torch.searchsorted(own, torch.arange(count * units + 1, device=own.device))
        return cls(left[order], right[order], own_offsets=offsets, count=count, **kind)

    @classmethod
    def of_matrix(cls, factors: Factors, at: int, count: int) -> ExpertFactors:
        """Factors of one matrix, with the units' offsets, as those of a stack."""
        assert factors.own_offsets is not None
        units = len(factors.own_offsets) - 1
        places = torch.arange(count * units + 1, device=factors.own_offsets.device) - at % count * units
        offsets = factors.own_offsets[places.clamp(0, units)]
        return cls(factors.left, factors.right, swap=factors.swap, own_offsets=offsets, count=count)

    def moved(self, first: torch.Tensor, second: torch.Tensor, *, turned: bool = False) -> Factors:
        """No other matrix's factors are made of these."""
        raise UnsupportedUse("experts' weights are computed from other parameters")

    def dense(self) -> Factors:
        """They have no form with one pair for all matrices."""
        raise UnsupportedUse("experts' weights have a mask, or axes, or several uses")

    def by_unit(self, sizes: torch.Tensor, order: int = 1) -> torch.Tensor:
        """The norm of this order, by unit, of sizes of the runs."""
        return (sizes.double().view(self.count, -1) ** order).sum(0) ** (1 / order)

    def lengths(self, layout: Layout) -> torch.Tensor:
        """Tokens of each unit in the matrix that has most of them: the roundings of every other are fewer."""
        return super(ExpertFactors, self).lengths(layout).view(self.count, -1).amax(0)

    def powers(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared norms by Gram matrices of the runs, and directly where these are not good enough."""
        assert self.own_offsets is not None
        left, right, offsets, sizes = [self.left], [self.right], self.own_offsets, (self.width, self.right.shape[1])
        tokens, products = super(ExpertFactors, self).lengths(layout), ops.row_products(self.left, self.right, offsets)
        if min(sizes) <= NARROW:
            self.imprecise = torch.ones(layout.units, dtype=torch.bool, device=offsets.device)
            squares = ops.sqnorm(self.left, self.right, offsets, "direct")
        else:
            # On a processor runs that are long are left to the direct route.
            most = longest_by_gram(*sizes) if offsets.device.type == "cpu" else INT64_MAX
            squares, short = (found[0] for found in ops.gram_norms(left, right, [1], offsets, (), most))
            gram_error = gammas([self.rounding().gram(*sizes)], tokens)[0] * short.square()
            self.imprecise = self.by_unit(gram_error) > REMEASURED * self.by_unit(squares)
            again = (((short > 0) & self.imprecise.repeat(self.count)) | (tokens > most)).unsqueeze(0)
            if again.device.type != "cpu" or bool(again.any()):
                squares = torch.where(again, ops.chosen_sqnorm(left, right, offsets, again), squares)[0]
        # Errors of the matrices are those of parts of one vector.
        return self.by_unit(squares), self.by_unit(products, 2)

    def add_to(self, total: torch.Tensor | None, weights: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Add the units' gradients by ``weights`` ``[units]`` to ``total`` ``[count, m n]``."""
        assert total is not None
        assert self.own_offsets is not None
        first, second = self.oriented
        ends = self.own_offsets[:: layout.units].tolist()
        for at, every in enumerate(total.view(self.count, first.shape[1], second.shape[1])):
            tokens, runs = slice(*ends[at : at + 2]), slice(at * layout.units, (at + 1) * layout.units + 1)
            if tokens.stop > tokens.start:
                ops.weighted_sum(
                    first[tokens], second[tokens], weights, every, offsets=self.own_offsets[runs] - tokens.start
                )
        return total

    def unit_to(self, total: torch.Tensor, unit: int, offsets: Sequence[int]) -> None:
        """Add one unit's gradient to ``total``."""
        first, second = self.oriented
        units = (len(offsets) - 1) // self.count
        for at, every in enumerate(total.view(self.count, first.shape[1], second.shape[1])):
            tokens = slice(*offsets[at * units + unit : at * units + unit + 2])
            if tokens.stop > tokens.start:
                every += ops.per_unit(first[tokens], second[tokens], torch.tensor([0, tokens.stop - tokens.start]))[0]


def join_experts(uses: list[Factors], units: int) -> list[Factors]:
    """Join uses of one stack, as a loop over its matrices makes them, into one."""
    first = uses[0]
    alike = {(use.stacked, use.swap) for use in uses} == {(True, first.swap)}
    if len(uses) < 2 or not (alike and isinstance(first, ExpertFactors)):
        return uses
    every = torch.arange(first.count * units, device=first.right.device)
    runs = torch.cat([every.repeat_interleave(use.own_offsets.diff()) for use in uses if use.own_offsets is not None])
    left, right = torch.cat([use.left for use in uses]), torch.cat([use.right for use in uses])
    return [ExpertFactors.of_tokens(left, right, runs, first.count, units, swap=first.swap)]
