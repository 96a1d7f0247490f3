"""What is told of a sequence at a pure epsilon: a public encoder's summary of its states, as one of K codes.

A Gaussian release of (epsilon, 1e-5) tells one bit with probability .553, .599, .678 or .798 at epsilon 1, 2, 4 or 8, and no
decision drawn from it is surer. Randomised response tells the same bit with .731, .881, .982 or .9997, and needs no delta. So a
sequence is first made as small as public text says that it can be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastdp.methods.response import check_response, keep_probability, randomised_response
from fastdp.ops.stream import NoiseStream

#: Rounds of Lloyd's algorithm.
_ROUNDS = 50
#: Weight of the ridge that finds what tells labels apart, over the mean variance of a state's entries.
_RIDGE = 1e-2


def pool_rows(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the tokens that are not padding: [B, T, d] to float64 [B, d] on the CPU."""
    wide = hidden.detach().double()
    real = wide.new_ones(wide.shape[:2]) if mask is None else mask.to(wide.device).double()
    found = (wide * real[:, :, None]).sum(1) / real.sum(1, keepdim=True).clamp_min(1)
    # A state that is not finite is an answer too: a refusal would tell.
    return found.nan_to_num(0.0, 0.0, 0.0).cpu()


@dataclass(frozen=True)
class Encoder:
    """A linear map of pooled states to few directions, learned from public text.

    Attributes:
        centre: float64 [d], the mean state.
        basis: float64 [d, width], orthonormal columns.
    """

    centre: Tensor
    basis: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        """[B, d] to [B, width]."""
        return (states - self.centre) @ self.basis

    @classmethod
    def learned(cls, states: Tensor, labels: Tensor | None, width: int) -> Encoder:
        """From public pooled states [n, d]: what tells their labels apart first, if there are labels, then what varies most."""
        centre = states.mean(0)
        centred = states - centre
        directions = torch.linalg.svd(centred, full_matrices=False).Vh[:width].T
        if labels is not None:
            covariance = centred.T @ centred / len(centred)
            ridge = _RIDGE * covariance.diagonal().mean() * torch.eye(len(centre), dtype=torch.float64)
            wanted = torch.nn.functional.one_hot(labels).double()
            # Of C classes the last is told by the others.
            told = torch.linalg.solve(covariance + ridge, centred.T @ (wanted - wanted.mean(0)) / len(centred))[:, :-1]
            directions = torch.cat([told, directions], 1)
        return cls(centre, torch.linalg.qr(directions[:, : min(width, len(centre))]).Q)


@dataclass(frozen=True)
class Codebook:
    """One of K codes of a sequence, learned from public text, by K-ary randomised response: ``epsilon``, without a delta.

    Few codes suffer less noise: two for most tasks of two classes, more where nothing labelled is public. Raises ValueError as
    `fastdp.methods.response.check_response`.
    """

    cells: int
    epsilon: float
    name: ClassVar[str] = "codebook"

    def __post_init__(self) -> None:
        check_response(self.cells, self.epsilon)

    def width(self, classes: int | None) -> int:
        """Directions that codes are told apart by."""
        return classes - 1 if classes else max(2, min(self.cells, 16))

    def fit(self, encoder: Encoder, states: Tensor) -> dict[str, Tensor]:
        """Centres of the codes among the encoded public states, and the mean state of each.

        Raises ValueError for fewer distinct texts than codes.
        """
        codes = encoder(states)
        if len(codes.unique(dim=0)) < self.cells:
            raise ValueError(
                f"{self.cells} codes need as many different public texts: give more, or ask for fewer codes"
            )
        centres = _centres(codes, self.cells)
        own = torch.cdist(codes, centres).argmin(1)
        if len(own.unique()) < self.cells:
            raise ValueError(
                f"the public texts fall into fewer than {self.cells} codes: give more, or ask for fewer codes"
            )
        return {"centres": centres, "states": torch.stack([states[own == k].mean(0) for k in range(self.cells)])}

    def encode(self, encoder: Encoder, learned: dict[str, Tensor], states: Tensor) -> Tensor:
        """The code of each state, int64 [B]."""
        return torch.cdist(encoder(states), learned["centres"]).argmin(1)

    def release(self, codes: Tensor, stream: NoiseStream) -> Tensor:
        """What leaves: int64 [B]."""
        return randomised_response(codes, self.cells, self.epsilon, stream)

    def decode(self, encoder: Encoder, learned: dict[str, Tensor], codes: Tensor) -> Tensor:
        """The mean public state of each code, [B, d]."""
        return learned["states"][codes]

    def describe(self) -> dict[str, Any]:
        """For a card."""
        kept = keep_probability(self.cells, self.epsilon)
        return {"name": self.name, "cells": self.cells, "epsilon": self.epsilon, "kept": kept}


#: As the noise of the other form is asked for: `ewft.codebook(...)` beside `ewft.release_once(...)`.
codebook = Codebook


def learn(
    mechanism: Codebook, states: Sequence[Tensor], labels: Sequence[Tensor] | None
) -> tuple[Encoder, dict[str, Tensor]]:
    """Encoder and what belongs to the mechanism, from public pooled states, and labels of their texts if there are any."""
    joined = torch.cat(list(states)).double()
    classes = None if labels is None else torch.cat(list(labels)).long().cpu()
    count = None if classes is None else int(classes.max()) + 1
    if count is not None and len(classes.unique()) < 2:  # type: ignore[union-attr]
        raise ValueError("the public texts are all of one class, which tells nothing apart: give texts of every class")
    if len(joined) < 2 or not math.isfinite(float(joined.sum())):
        raise ValueError("there is too little public text to learn from, or its hidden states are not finite")
    encoder = Encoder.learned(joined, classes, mechanism.width(count))
    return encoder, mechanism.fit(encoder, joined)


def _centres(codes: Tensor, count: int) -> Tensor:
    """K-means: each next centre begins at the code farthest from those there are, the first at the middle; deterministic."""
    centres = [codes[(codes - codes.mean(0)).norm(dim=1).argmin()]]
    while len(centres) < count:
        apart = torch.cdist(codes, torch.stack(centres)).amin(1)
        centres.append(codes[apart.argmax()])
    found = torch.stack(centres)
    for _ in range(_ROUNDS):
        own = torch.cdist(codes, found).argmin(1)
        moved = torch.stack([codes[own == k].mean(0) if bool((own == k).any()) else found[k] for k in range(count)])
        if torch.equal(moved, found):
            break
        found = moved
    return found
