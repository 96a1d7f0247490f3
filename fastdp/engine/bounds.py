"""Upper bounds of the norm of what a unit adds to a sum, and the weights that follow from them: one way in, one way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastdp.engine.constants import sent
from fastdp.ops.bounds import FLOOR, LARGEST_RATIO

# float64 arithmetic on a few thousand numbers, each positive: far below this.
_SLACK = 1 + 2.0**-30


@dataclass(frozen=True)
class UpperNorms:
    """Norms that nothing a unit adds can exceed, ``[groups, units]`` float64, made by `Norms.upper` alone.

    ``measured`` are the computed norms to the power of their order, for checks and counts: nothing is scaled by them.
    """

    norms: torch.Tensor
    measured: torch.Tensor

    def weights(self, bounds: Sequence[float]) -> torch.Tensor:
        """``min(1, bound / norm)`` of each group and unit, rounded down to float32; see `down`."""
        limits = sent(tuple(bounds), torch.float64, self.norms.device).unsqueeze(1)
        return down(limits / self.norms)


def down(ratios: torch.Tensor) -> torch.Tensor:
    """Ratios of a bound to a norm ``[..., units]`` as float32 weights, at most 1 and never rounded up.

    0 in every group for a unit with a NaN among its ratios, or one so small (norms that are infinite or beyond 2^60 bounds)
    that a float32 weight could not carry it.
    """
    kept = (ratios >= 1 / LARGEST_RATIO).reshape(-1, ratios.shape[-1]).all(0)
    weights = torch.where(ratios >= 1, 1.0, (ratios * (1 - 2.0**-23)).float())
    return torch.where(kept, weights, 0.0)


def among_units(units: int, tokens: int, spread: float) -> float:
    """How far rounding *among* the units of one sum may move it when one unit is left out, in units of the clipping bound.

    What a unit adds is within its bound; that the others' sums then round in other places is not part of it. Each of the
    others is off by at most gamma_k times its weight times its products, with it and without it, where k counts the
    additions that a term may go through (docs/clipping.md).

    Args:
        units: in one logical batch.
        tokens: added up in one micro-batch, of all units, and micro-batches in the logical batch: an upper bound of k.
        spread: the most that a unit's products are above its norm: about the square root of its tokens where their
            gradients are orthogonal.
    """
    error = (tokens + 3) * 2.0**-24
    return 2 * (units - 1) * spread * error / (1 - error) if error < 0.25 else float("inf")


def among_units_in_words(units: int, tokens: int, spread: float) -> str:
    """`among_units` as a card states it, beside what roundings that are independent of each other come to."""
    worst = among_units(units, tokens, spread)
    likely = 2 * spread * (max(0, units - 1) * (tokens + 3)) ** 0.5 * 2.0**-24
    return (
        f"rounding among the units of one sum (about {units}, {tokens} additions) is no part of any unit's bound: it moves a sum "
        f"by some {likely:.1e} of the bound where roundings are independent, and by {worst:.1e} at most"
    )


@dataclass(frozen=True)
class _Part:
    group: int
    powers: torch.Tensor
    products: torch.Tensor | None
    relative: float
    gram: float
    added: float
    floor: float


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
        self._parts: list[_Part] = []
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
        gram: float = 0.0,
        added: float = 0.0,
    ) -> None:
        """Take a part of a group's gradient: of L2 norms their squares.

        Args:
            group: which.
            powers: sums of squares or sizes over the part, ``[units]``.
            entries: how many there are.
            relative: error of ``powers`` against themselves.
            products: ``[units]`` float64, of :func:`fastdp.ops.row_products`; None for an instance, which is added as it
                was measured.
            gram: error of ``powers`` against the products to the power of the order.
            added: error of the norm, and of what is added to the sum, against the products.
        """
        floor = float(entries) * FLOOR**self.order
        self._parts.append(_Part(group, powers, products, relative, gram, added, floor))

    def measured(self) -> torch.Tensor:
        """The computed powers so far ``[groups, units]`` float64: never a bound of anything."""
        new = self._parts[self._counted :]
        if new:
            self._measured.index_add_(0, self._groups(new), stacked([p.powers for p in new]))
            self._counted = len(self._parts)
        return self._measured.clone()

    def upper(self) -> UpperNorms:
        """The bounds: the norm of the computed parts with their errors, and that of the errors of what is added.

        The parts of a group are one vector, the errors of what is added another: the norm of their sum is at most the sum of
        the two norms.
        """
        measured, added = self.measured(), torch.zeros(self._shape, dtype=torch.float64, device=self._device)
        highest = measured.clone()
        if self._parts:
            powers, groups = stacked([p.powers for p in self._parts]), self._groups(self._parts)
            none = sent((0.0,) * self._shape[1], torch.float64, self._device)
            products = stacked([none if p.products is None else p.products for p in self._parts])
            reach = products**self.order
            errors = powers.abs() * self._constants([p.relative for p in self._parts])
            errors += self._constants([p.floor for p in self._parts])
            errors += reach * self._constants([p.gram for p in self._parts])
            highest.index_add_(0, groups, errors)
            added.index_add_(0, groups, reach * self._constants([p.added**self.order for p in self._parts]))
        norms = highest.clamp(min=0) ** (1 / self.order) + added ** (1 / self.order)
        return UpperNorms(norms * _SLACK, measured)

    def _groups(self, parts: Sequence[_Part]) -> torch.Tensor:
        return sent(tuple(p.group for p in parts), torch.int64, self._device)

    def _constants(self, values: list[float]) -> torch.Tensor:
        return sent(tuple(values), torch.float64, self._device).unsqueeze(1)


def stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows as float64 ``[rows, units]``; on a GPU in a few launches, however many there are."""
    kinds: dict[torch.dtype, list[int]] = {}
    for at, row in enumerate(rows):
        kinds.setdefault(row.dtype, []).append(at)
    blocks = [torch.stack([rows[at] for at in members]).double() for members in kinds.values()]
    if len(blocks) == 1:
        return blocks[0]
    order = [at for members in kinds.values() for at in members]
    places = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(blocks).index_select(0, sent(tuple(places), torch.int64, rows[0].device))
