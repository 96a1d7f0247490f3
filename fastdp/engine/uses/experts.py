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
    """Factors of a stack of ``count`` matrices; ``own_offsets`` ``[count * units + 1]`` say where runs begin.

    ``strides`` say where the stack lies in the parameter: LoRA's adapters of all experts are one matrix to torch.
    """

    count: int = 1
    strides: tuple[int, ...] | None = None
    imprecise: torch.Tensor = None  # type: ignore[assignment]

    finds_norms: ClassVar[bool] = True

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
        if factors.own_offsets is None:
            raise UnsupportedUse("one of several matrices is used on tokens in the rows' order")
        units = len(factors.own_offsets) - 1
        places = torch.arange(count * units + 1, device=factors.own_offsets.device) - at % count * units
        offsets = factors.own_offsets[places.clamp(0, units)]
        return cls(factors.left, factors.right, swap=factors.swap, own_offsets=offsets, count=count)

    def product(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Tokens ``[N, n]``, each times its own of the matrices ``[count, n, m]``."""
        assert self.own_offsets is not None
        lengths = self.own_offsets[:: (len(self.own_offsets) - 1) // self.count].diff().tolist()
        return torch.cat([part @ own.to(x.dtype) for part, own in zip(x.split(lengths), matrix)])

    def stack(self, total: torch.Tensor) -> torch.Tensor:
        """The stack ``[count, m, n]`` in a tensor of the parameter's size."""
        size = self.count, *(factor.shape[1] for factor in self.sides)
        return total.view(size) if self.strides is None else total.as_strided(size, self.strides)

    def dense(self) -> Factors:
        """They have no form with one pair for all matrices."""
        raise UnsupportedUse("experts' weights have a mask, or axes, or several uses")

    def by_unit(self, sizes: torch.Tensor, order: float = 1) -> torch.Tensor:
        """The norm of this order, by unit, of sizes of the runs: of lengths the most, as roundings of all others are fewer."""
        return torch.linalg.vector_norm(sizes.double().view(self.count, -1), order, 0)

    def powers(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared norms by Gram matrices of the runs, and directly where these are not good enough."""
        assert self.own_offsets is not None
        left, right, offsets, sizes = [self.left], [self.right], self.own_offsets, (self.width, self.right.shape[1])
        products, tokens = ops.row_products(self.left, self.right, offsets, 2)
        if min(sizes) <= NARROW:
            self.imprecise = torch.ones(layout.units, dtype=torch.bool, device=offsets.device)
            squares = ops.sqnorm(self.left, self.right, offsets, "direct")
        else:
            # On a processor runs that are long are left to the direct route.
            most = longest_by_gram(*sizes) if offsets.device.type == "cpu" else INT64_MAX
            squares, short = (found[0] for found in ops.gram_norms(left, right, [1], offsets, most))
            gram_error = gammas([self.rounding().gram(*sizes)], tokens)[0] * short.square()
            self.imprecise = self.by_unit(gram_error) > REMEASURED * self.by_unit(squares)
            again = (((short > 0) & self.imprecise.repeat(self.count)) | (tokens > most)).unsqueeze(0)
            if again.device.type != "cpu" or bool(again.any()):
                squares = torch.where(again, ops.chosen_sqnorm(left, right, offsets, again), squares)[0]
        # Errors of the matrices are those of parts of one vector.
        return self.by_unit(squares), self.by_unit(products, 2)

    def add_to(self, total: torch.Tensor | None, weights: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Add the units' gradients by ``weights`` ``[units]`` to ``total``, of the parameter's size."""
        assert total is not None
        assert self.own_offsets is not None
        first, second = self.sides
        ends = self.own_offsets[:: layout.units].tolist()
        for at, every in enumerate(self.stack(total)):
            tokens, runs = slice(*ends[at : at + 2]), slice(at * layout.units, (at + 1) * layout.units + 1)
            if tokens.stop > tokens.start:
                offsets, out = self.own_offsets[runs] - tokens.start, every if every.is_contiguous() else None
                found = ops.weighted_sum(first[tokens], second[tokens], weights, out, offsets=offsets)
                if out is None:
                    every += found
        return total

    def unit_to(self, total: torch.Tensor, unit: int, offsets: Sequence[int]) -> None:
        """Add one unit's gradient to ``total``."""
        units = (len(offsets) - 1) // self.count
        for at, every in enumerate(self.stack(total)):
            super(ExpertFactors, self).unit_to(every, at * units + unit, offsets)


def join_experts(uses: list[Factors], units: int) -> list[Factors]:
    """Join uses of one stack, as a loop over its matrices makes them, into one."""
    first = uses[0]
    alike = {(use.swap, use.strides) if isinstance(use, ExpertFactors) else None for use in uses}
    if len(uses) < 2 or len(alike) > 1 or not isinstance(first, ExpertFactors):
        return uses
    every = torch.arange(first.count * units, device=first.right.device)
    runs = torch.cat([every.repeat_interleave(use.own_offsets.diff()) for use in uses if use.own_offsets is not None])
    left, right = torch.cat([use.left for use in uses]), torch.cat([use.right for use in uses])
    return [ExpertFactors.of_tokens(left, right, runs, first.count, units, swap=first.swap, strides=first.strides)]
