"""Partition-wise gradient magnitudes: how an example is clipped, and what one example can move (Definition 8, Lemma 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fastdp.engine.bounds import UpperNorms, round_down
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
        """What an example's (for MGNA: normalised) gradient is clipped to over partitions of these sizes.

        c for MG, c / mean |P| for MGNA. It belongs to the partitions that remain: with another set's bound the
        noise would not match.
        """
        if self.kind == "MG":
            return self.max_grad_norm
        return self.max_grad_norm * len(sizes) / sum(sizes)

    def sensitivity(self, sizes: Sequence[int], adjacency: str = "add_remove") -> float:
        """L2 sensitivity of the vector of magnitudes (Lemma 3).

        Replacing an example moves MG by up to twice as much, and MGNA, whose magnitudes only grow with an example,
        by the square root of 2: two vectors without negative entries are never further apart than that.
        """
        bound = self.bound(sizes)
        if self.kind == "MG":
            bound /= min(sizes)
        if adjacency == "add_remove":
            return bound
        return bound * (math.sqrt(2) if self.kind == "MGNA" else 2)

    def scales(self, upper: UpperNorms, sizes: torch.Tensor) -> torch.Tensor:
        """Clipping factors ``[units]`` float32 from upper bounds of the gradient's L1 norms by partition.

        0 for a unit whose gradient is not finite, and for one beyond 2^40 times the bound.
        """
        norms = upper.norms if self.kind == "MG" else upper.norms / sizes.unsqueeze(1)
        return round_down(self.bound(sizes.tolist()) / norms.sum(0))
