"""Upper bounds of the norm of what a unit adds to a sum, and the weights that follow from them: one way in, one way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

import fastdp.ops.bounds as bounds
from fastdp.ops.bounds import FLOOR, PartialNorms, Roundings, round_down, stack_rows, upper_norms
from fastdp.ops.placed import CONSTANTS, ReplayCache, copy_to_device

#: Squares found by Gram matrices are found again by the direct route where rounding may hide more than this share of them,
#: which is 3% of the norm: less is not worth a product as large as the weights' gradients. Where tokens are orthogonal, the
#: share is about T / 36,000 for matrices of 2,048 by 8,192 on a GPU.
REMEASURED = 1 / 16


@dataclass(frozen=True)
class UpperNorms:
    """Norms that nothing a unit adds can exceed, ``[groups, units]`` float64, made by `Norms.upper` alone.

    ``measured`` are the computed norms to the power of their order, for checks and counts: nothing is scaled by them.
    ``cancelling`` says of which units, bool ``[units]``, the tokens cancel so far that the order of their sum matters.
    """

    norms: torch.Tensor
    measured: torch.Tensor
    cancelling: torch.Tensor

    def weights(self, bounds: Sequence[float]) -> torch.Tensor:
        """``min(1, bound / norm)`` of each group and unit, rounded down to float32; see `fastdp.ops.bounds.round_down`."""
        limits = CONSTANTS[tuple(bounds), torch.float64, self.norms.device].unsqueeze(1)
        return round_down(limits / self.norms)


#: Of what is measured as it is added.
NONE = Roundings(0)


class Errors(NamedTuple):
    """How far rounding may have carried the powers of one part, and what it adds to a sum.

    Args:
        entries: how many there are.
        relative: error of the powers against themselves.
        gram: roundings of the powers against the products to the power of the order.
        added: roundings of the norm, and of what is added to the sum, against the products.
        times: error besides, as a multiple of the products.
    """

    entries: int
    relative: float
    gram: Roundings = NONE
    added: Roundings = NONE
    times: float = 0.0


def gammas(roundings: Sequence[Roundings], tokens: torch.Tensor) -> torch.Tensor:
    """`Roundings.gamma` of k parts by the tokens of each unit ``[k, units]``, float64."""
    return bounds.gammas_from_slopes(_SLOPES[tuple(roundings), tokens.device], tokens)


def _slopes(roundings: tuple[Roundings, ...], device: torch.device) -> torch.Tensor:
    numbers = [[own.unit * part for part in own[:3]] for own in roundings]
    return copy_to_device(torch.tensor(numbers, dtype=torch.float64).t().contiguous(), device).unsqueeze(2)


_SLOPES = ReplayCache(_slopes, 256)


class Norms:
    """Norms of each unit's gradient by group, gathered part by part with what rounding may have hidden.

    Args:
        groups: how many groups.
        units: how many units.
        device: where.
        order: 2, or 1 for L1 norms: `add` then takes sums of absolute values.
    """

    def __init__(self, groups: int, units: int, device: torch.device, order: int = 2):
        self.order = order
        self._shape = groups, units
        self._device = device
        self._parts: list[PartialNorms] = []
        self._groups: list[int] = []
        self._errors: list[Errors] = []

    def add(
        self,
        group: int,
        powers: torch.Tensor,
        errors: Errors,
        products: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> None:
        """Take a part of a group's gradient.

        Args:
            group: which.
            powers: sums of squares or, of L1 norms, of sizes over the part, ``[units]``.
            errors: of the powers.
            products: ``[units]`` float64, of `fastdp.ops.row_products`; None for an instance, which is added as it
                was measured.
            tokens: ``[units]`` float64, of `fastdp.ops.token_counts`: those that the unit's own roundings go by.
        """
        rows = [None if each is None else each.unsqueeze(0) for each in (products, tokens)]
        self.add_rows([group], powers.unsqueeze(0), [errors], *rows)

    def add_rows(
        self,
        groups: Sequence[int],
        powers: torch.Tensor,
        errors: Sequence[Errors],
        products: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> None:
        """`add` of k parts at once: ``powers``, ``products`` and ``tokens`` are ``[k, units]``, a row each."""
        self._parts.append(PartialNorms(powers, products, tokens))
        self._groups += groups
        self._errors += errors

    def measured(self) -> torch.Tensor:
        """The computed powers so far ``[groups, units]`` float64: never a bound of anything."""
        found = torch.zeros(self._shape, dtype=torch.float64, device=self._device)
        if not self._parts:
            return found
        return found.index_add_(0, self._group_numbers(), stack_rows([part.powers for part in self._parts]))

    def upper(self) -> UpperNorms:
        """The bounds, by `fastdp.ops.bounds.upper_norms`."""
        if not self._parts:
            none = self.measured()
            return UpperNorms(none, none, torch.zeros(self._shape[1], dtype=torch.bool, device=self._device))
        errors = _ERRORS[tuple(self._errors), self.order, self._device]
        return UpperNorms(*upper_norms(self._parts, self._group_numbers(), errors, self._shape[0], self.order))

    def _group_numbers(self) -> torch.Tensor:
        return CONSTANTS[tuple(self._groups), torch.int64, self._device]


def _constants(every: tuple[Errors, ...], order: int, device: torch.device) -> torch.Tensor:
    """Of each part what its powers are off by relative to themselves, and at least, and what is added against its products,
    besides what depends on tokens; and the slopes of both errors by tokens: ``[9, parts, 1]``.
    """
    floor = FLOOR**order
    numbers = [[error.relative, error.entries * floor, error.times] for error in every]
    for own, (_, _, gram, added, _) in zip(numbers, every):
        own += [
            roundings.unit * part for parts in zip(gram[:3], added[:3]) for roundings, part in zip((gram, added), parts)
        ]
    return copy_to_device(torch.tensor(numbers, dtype=torch.float64).t().contiguous(), device).unsqueeze(2)


_ERRORS = ReplayCache(_constants, 64)
