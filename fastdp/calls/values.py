"""What a pass gives each of its rows, compared between passes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fastdp.calls.batches import cropped


@dataclass
class RowValues:
    """What a forward pass gives each of its rows (or packed units), and how the model's loss is made of it.

    Args:
        values: for each loss function in the model its loss by row, ``[rows]``; without a loss, the outputs, rows first.
        shares: the coefficient of each loss function in the model's loss; None for its own sums, whose values have theirs.
        rest: what the model's loss holds beyond them.
        draws: the random state behind the pass, if it drew random numbers.
        inputs: gradients of one backward pass at every embedding and floating-point input, rows first.
    """

    values: list[torch.Tensor]
    shares: list[float | None] = field(default_factory=list)
    rest: float = 0.0
    draws: tuple[bytes, ...] | None = None
    inputs: list[torch.Tensor] = field(default_factory=list)

    def finite(self, row: int) -> bool:
        return all(bool(torch.isfinite(value[row]).all()) for value in self.values)

    def size(self, row: int) -> float:
        """A row's loss, or the smallest of its outputs' largest entries."""
        sizes = [float(value[row].abs().max()) for value in self.values]
        return min(sizes) if self._weights is None else sum(map(operator.mul, self._weights, sizes))

    def gap(self, row: int, other: RowValues, at: int) -> float:
        """The largest difference of a row's values from row ``at`` of another pass, relative to their size, or the loss."""
        if len(self.values) != len(other.values):
            return float("inf")
        found = [_difference(a[row], b[at], a) for a, b in zip(self.values, other.values)]
        if self._weights is None:
            return max((gap / size for gap, size in found), default=0.0)
        whole = sum(weight * size for weight, (_, size) in zip(self._weights, found))
        gaps = [weight * gap for weight, (gap, _) in zip(self._weights, found) if weight]
        return max(gaps, default=0.0) / max(whole, 1e-30)

    @property
    def _weights(self) -> list[float] | None:
        """How much each loss counts in the model's; None for outputs."""
        return (
            [1.0 if share is None else abs(share) for share in self.shares]
            if self.shares != [0.0] * len(self.shares)
            else None
        )

    def unseen(self, rows: Sequence[int]) -> list[int]:
        """Rows that have parts of the loss which none of these rows has, so that they tell nothing of it."""
        parts = [value.abs().nan_to_num(0.0, 0.0, 0.0) for value in self.values] if self._weights else []
        return [int(part.argmax()) for part in parts if part.any() and not part[list(rows)].any()]

    def input_gap(self, row: int, other: RowValues, at: int) -> float:
        """The same of the gradients at a row's inputs where both have tokens, relative to their norm; 0 if neither is finite."""
        worst = 0.0
        for a, b in zip(self.inputs, other.inputs):
            if a.dim() != b.dim() or row >= a.shape[0] or at >= b.shape[0]:
                continue
            one, two = cropped(a[row].double(), b[at].double())
            sizes = float(one.norm()), float(two.norm())
            if sum(map(math.isfinite, sizes)) == 1:
                return math.inf
            if 1e-30 < max(sizes) < math.inf:
                worst = max(worst, float((one - two).norm()) / max(sizes))
        return worst


def _difference(one: torch.Tensor, two: torch.Tensor, every: torch.Tensor) -> tuple[float, float]:
    """How far two rows' values are apart, infinite where only one is finite, and their size among all rows."""
    if one.dim() != two.dim():
        return math.inf, 1.0
    one, two = cropped(one, two)
    finite = every[torch.isfinite(every)]
    size = max(float(one.abs().max()), float(finite.abs().mean()) if finite.numel() else 0.0, 1e-30)
    gap = 0.0 if torch.equal(one, two) else float((one.double() - two.double()).abs().max())
    return (gap, size) if gap == gap else (math.inf, 1.0)
