"""What is told of a sequence at a pure epsilon: a public encoder's summary of its states, as one of K codes.

A Gaussian release of (epsilon, 1e-5) tells one bit with probability .553, .599, .678 or .798 at epsilon 1, 2, 4 or 8. Randomised
response tells the same bit with .731, .881, .982 or .9997, and needs no delta. So a sequence is first made as small as public
text says that it can be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.cluster.vq import kmeans2
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
class Codebook:
    """One of K codes of a sequence by K-ary randomised response: ``epsilon``, without a delta.

    Few codes suffer less noise: two for most tasks of two classes, more where nothing labelled is public. Raises ValueError as
    `fastdp.methods.response.check_response`.
    """

    cells: int
    epsilon: float

    def __post_init__(self) -> None:
        check_response(self.cells, self.epsilon)

    def release(self, codes: Tensor, stream: NoiseStream) -> Tensor:
        """What leaves of codes [B]: int64 [B]."""
        return randomised_response(codes, self.cells, self.epsilon, stream)

    def describe(self) -> dict[str, Any]:
        kept = keep_probability(self.cells, self.epsilon)
        return {"name": "codebook", "cells": self.cells, "epsilon": self.epsilon, "kept": kept}


#: As the noise of the other form is asked for: `ewft.codebook(...)` beside `ewft.release_once(...)`.
codebook = Codebook


@dataclass(frozen=True)
class Codes:
    """Codes of pooled states, learned from public text; all float64."""

    #: The mean state [d].
    centre: Tensor
    #: Directions that codes are told apart by: orthonormal columns [d, width].
    basis: Tensor
    #: Of the codes, along these directions [K, width].
    centres: Tensor
    #: The mean public state of each code [K, d].
    states: Tensor

    def encode(self, states: Tensor) -> Tensor:
        """The code of each state [B, d], int64 [B]."""
        return torch.cdist((states - self.centre) @ self.basis, self.centres).argmin(1)

    @classmethod
    def learn(cls, batches: Sequence[Tensor], labels: Sequence[Tensor] | None, cells: int) -> Codes:
        """From public pooled states, and labels of their texts if there are any."""
        states = torch.cat(list(batches)).double()
        if len(states) < 2 or not math.isfinite(float(states.sum())):
            raise ValueError("there is too little public text to learn from, or its hidden states are not finite")
        classes = None if labels is None else torch.cat(list(labels)).long().cpu()
        if classes is not None and len(classes.unique()) < 2:
            raise ValueError(
                "the public texts are all of one class, which tells nothing apart: give texts of every class"
            )
        centre = states.mean(0)
        basis = _directions(states - centre, classes, max(2, min(cells, 16)))
        reduced = (states - centre) @ basis
        if len(reduced.unique(dim=0)) < cells:
            raise ValueError(f"{cells} codes need as many different public texts: give more, or ask for fewer codes")
        centres = _centres(reduced, cells)
        own = torch.cdist(reduced, centres).argmin(1)
        if len(own.unique()) < cells:
            raise ValueError(f"the public texts fall into fewer than {cells} codes: give more, or ask for fewer codes")
        return cls(centre, basis, centres, torch.stack([states[own == k].mean(0) for k in range(cells)]))


def _directions(centred: Tensor, classes: Tensor | None, width: int) -> Tensor:
    """Orthonormal columns: what tells the classes apart, or without classes the ``width`` directions that vary most."""
    if classes is None:
        directions = torch.linalg.svd(centred, full_matrices=False).Vh[:width].T
    else:
        covariance = centred.T @ centred / len(centred)
        ridge = _RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.float64)
        wanted = torch.nn.functional.one_hot(classes).double()
        # Of C classes the last is told by the others.
        directions = torch.linalg.solve(covariance + ridge, centred.T @ (wanted - wanted.mean(0)) / len(centred))[
            :, :-1
        ]
    return torch.linalg.qr(directions[:, : centred.shape[1]]).Q


def _centres(codes: Tensor, count: int) -> Tensor:
    """K-means: each next centre begins at the code farthest from those there are, the first at the middle; deterministic."""
    centres = [codes[(codes - codes.mean(0)).norm(dim=1).argmin()]]
    while len(centres) < count:
        apart = torch.cdist(codes, torch.stack(centres)).amin(1)
        centres.append(codes[apart.argmax()])
    found, _ = kmeans2(codes.numpy(), torch.stack(centres).numpy(), iter=_ROUNDS, minit="matrix")
    return torch.from_numpy(found)
