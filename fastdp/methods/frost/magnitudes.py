"""Partition-wise gradient magnitudes: how an example is clipped, and what one example can move (Definition 8, Lemma 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fastdp.engine.bounds import UpperNorms
from fastdp.ops.bounds import round_down
from fastdp.validate import one_of, positive

Kind = Literal["MG", "MGNA"]


@dataclass(frozen=True)
class Magnitude:
    """A magnitude of Definition 8, in L1 norms (alpha = 1).

    ``MG`` clips an example's gradient and normalises each partition's sum by its size; ``MGNA`` normalises and takes
    absolute values before it clips, so that examples do not cancel.

    Args:
        kind: which.
        max_grad_norm: the clipping threshold c.
    """

    kind: Kind = "MGNA"
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        one_of(("MG", "MGNA"), magnitude=self.kind)
        positive(max_grad_norm=self.max_grad_norm)

    def bound(self, sizes: Sequence[int]) -> float:
        """What an example's gradient is clipped to: c for MG; for MGNA, of the normalised one, c / mean |P|.

        The sizes are of the partitions that remain: with another set's bound the noise would not match.
        """
        return self.max_grad_norm * (1 if self.kind == "MG" else len(sizes) / sum(sizes))

    def sensitivity(self, sizes: Sequence[int]) -> float:
        """L2 sensitivity of the vector of magnitudes to an example more or less (Lemma 3)."""
        return self.bound(sizes) / (min(sizes) if self.kind == "MG" else 1)

    def scales(self, upper: UpperNorms, sizes: torch.Tensor) -> torch.Tensor:
        """Clipping factors ``[units]`` float32 from upper bounds of the gradient's L1 norms by partition.

        0 for a unit whose gradient is not finite, and for one beyond 2^40 times the bound.
        """
        norms = upper.norms if self.kind == "MG" else upper.norms / sizes.unsqueeze(1)
        return round_down(self.bound(sizes.tolist()) / norms.sum(0))
