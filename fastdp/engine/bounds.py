"""Upper bounds of the norm of what a unit adds to a sum, and the weights that follow from them: one way in, one way out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastdp.ops.bounds import EARLY, FLOOR, LARGEST_RATIO, Roundings
from fastdp.ops.placed import CONSTANTS, ReplayCache, copy_to_device

#: Squares found by Gram matrices are found again by the direct route where rounding may hide more than this share of them,
#: which is 3% of the norm: less is not worth a product as large as the weights' gradients. Where tokens are orthogonal, the
#: share is about T / 36,000 for matrices of 2,048 by 8,192 on a GPU.
REMEASURED = 1 / 16
# float64 arithmetic on a few thousand numbers, each positive: far below this.
_SLACK = 1 + 2.0**-30


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
        """``min(1, bound / norm)`` of each group and unit, rounded down to float32; see `round_down`."""
        limits = CONSTANTS[tuple(bounds), torch.float64, self.norms.device].unsqueeze(1)
        return round_down(limits / self.norms)


def round_down(ratios: torch.Tensor) -> torch.Tensor:
    """Ratios of a bound to a norm ``[..., units]`` as float32 weights, at most 1 and never rounded up.

    0 in every group for a unit with a NaN among its ratios, or one so small (norms that are infinite or beyond 2^40 bounds)
    that a float32 weight could not carry it.
    """
    kept = (ratios >= 1 / LARGEST_RATIO).reshape(-1, ratios.shape[-1]).all(0)
    weights = torch.where(ratios >= 1, 1.0, (ratios * (1 - 2.0**-23)).float())
    return torch.where(kept, weights, 0.0)


#: A unit whose products are this many times its norm is added on its own: tokens of a unit that are orthogonal to each other
#: have the square root of their number.
CANCELLING = 2.0**7
#: Of what is measured as it is added.
NONE = Roundings(0)


class Errors(NamedTuple):
    """How far rounding may have carried the powers of one part, and what it adds to a sum: as `Norms.add` has them."""

    entries: int
    relative: float
    gram: Roundings = NONE
    added: Roundings = NONE
    times: float = 0.0


class _Rows(NamedTuple):
    groups: Sequence[int]
    powers: torch.Tensor
    errors: Sequence[Errors]
    products: torch.Tensor | None
    tokens: torch.Tensor | None


def gammas(roundings: Sequence[Roundings], tokens: torch.Tensor) -> torch.Tensor:
    """`Roundings.gamma` of k parts by the tokens of each unit ``[k, units]``, float64."""
    return _gammas(_SLOPES[tuple(roundings), tokens.device], tokens)


def _gammas(slopes: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """From their `Roundings` as ``[3, ..., k, 1]``."""
    fixed, token, early = slopes
    errors = fixed + token * tokens + early * tokens.clamp(max=EARLY)
    return torch.where(errors < 0.25, errors / (1 - errors), torch.inf)


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
        self._rows: list[_Rows] = []
        self._measured = torch.zeros(self._shape, dtype=torch.float64, device=device)
        self._counted = 0

    def add(
        self,
        group: int,
        powers: torch.Tensor,
        entries: int,
        *,
        relative: float,
        products: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        gram: Roundings = NONE,
        added: Roundings = NONE,
        times: float = 0.0,
    ) -> None:
        """Take a part of a group's gradient: of L2 norms their squares.

        Args:
            group: which.
            powers: sums of squares or sizes over the part, ``[units]``.
            entries: how many there are.
            relative: error of ``powers`` against themselves.
            products: ``[units]`` float64, of :func:`fastdp.ops.row_products`; None for an instance, which is added as it
                was measured.
            tokens: ``[units]`` float64, of :func:`fastdp.ops.token_counts`: those that the unit's own roundings go by.
            gram: roundings of ``powers`` against the products to the power of the order.
            added: roundings of the norm, and of what is added to the sum, against the products.
            times: error besides, as a multiple of the products.
        """
        errors = Errors(entries, relative, gram, added, times)
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
        self._rows.append(_Rows(groups, powers, errors, products, tokens))

    def measured(self) -> torch.Tensor:
        """The computed powers so far ``[groups, units]`` float64: never a bound of anything."""
        new = self._rows[self._counted :]
        if new:
            self._measured.index_add_(0, self._groups(new), stack_rows([rows.powers for rows in new]))
            self._counted = len(self._rows)
        return self._measured.clone()

    def upper(self) -> UpperNorms:
        """The bounds: the norm of the computed parts with their errors, and that of the errors of what is added.

        The parts of a group are one vector, the errors of what is added another: the norm of their sum is at most the sum of
        the two norms.
        """
        cancelling = torch.zeros(self._shape[1], dtype=torch.bool, device=self._device)
        measured, added = self.measured(), torch.zeros(self._shape, dtype=torch.float64, device=self._device)
        highest = measured.clone()
        if self._rows:
            powers, groups = stack_rows([rows.powers for rows in self._rows]), self._groups(self._rows)
            none = CONSTANTS[(0.0,) * self._shape[1], torch.float64, self._device]
            products, tokens = (
                stack_rows(
                    [none.expand(len(r.groups), -1) if each is None else each for r, each in zip(self._rows, column)]
                )
                for column in zip(*[(rows.products, rows.tokens) for rows in self._rows])
            )
            reach = products**self.order
            every = tuple(itertools.chain.from_iterable([rows.errors for rows in self._rows]))
            constants = _ERRORS[every, self.order, self._device]
            relative, least, times = constants[:3]
            gram, apart = _gammas(constants[3:].view(3, 2, -1, 1), tokens)
            errors = powers.abs() * relative
            errors += least
            errors += reach * gram
            highest.index_add_(0, groups, errors)
            apart += times
            added.index_add_(0, groups, reach * apart**self.order)
        norms = highest.clamp(min=0) ** (1 / self.order) + added ** (1 / self.order)
        norms = norms * _SLACK
        if self._rows:
            cancelling = (products > CANCELLING * norms[groups]).any(0)
        return UpperNorms(norms, measured, cancelling)

    def _groups(self, every: Sequence[_Rows]) -> torch.Tensor:
        return CONSTANTS[
            tuple(itertools.chain.from_iterable([rows.groups for rows in every])), torch.int64, self._device
        ]


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


def stack_rows(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
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
