"""Repeated release: what a trainable bottom model costs, which sends each example again in every epoch (SAP, appendix)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastdp.audit.figures import Figures
from fastdp.audit.inversion import InversionResult, inversion, nearest_tokens


@dataclass(frozen=True)
class RepeatedReleaseResult(Figures):
    """What E releases of the same tokens give away.

    Attributes:
        single: the attack on each release by itself.
        union: a token counts as recovered if any of the E attacks recovers it, which is how the paper counts; it says how
            much is at stake, not what an attacker can point to, who does not know which attack is right.
        averaged: one attack, on the mean of the releases, whose noise is smaller by sqrt(E).
    """

    single: tuple[InversionResult, ...]
    union: InversionResult
    averaged: InversionResult


def repeated_release(
    releases: Sequence[torch.Tensor], table: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None = None
) -> RepeatedReleaseResult:
    """Attack E releases of the same tokens' embeddings, one at a time and together.

    Args:
        releases: each [..., d], the noised embeddings that were sent in one epoch.
        table: [V, d], the rows that the attacker searches: those before training serve him, since training moves them little.
        ids: int64 [...], the tokens.
        mask: bool [...], which of them count.

    Raises:
        ValueError: no release, or releases of different shapes.

    >>> import torch
    >>> from fastdp.audit import repeated_release
    >>> table = torch.eye(3)
    >>> found = repeated_release([table[[0, 1, 1]], table[[0, 0, 2]]], table, torch.tensor([0, 1, 2]))
    >>> found.union.recovered, len(found.single)
    (1.0, 2)
    """
    if not releases:
        raise ValueError("there is no release to attack")
    if any(release.shape != releases[0].shape for release in releases):
        raise ValueError("the releases differ in shape: they must be of the same tokens")
    guesses = [nearest_tokens(release, table) for release in releases]
    ever = torch.stack([guess == ids for guess in guesses]).any(0)
    return RepeatedReleaseResult(
        single=tuple(inversion(guess, ids, mask) for guess in guesses),
        union=inversion(torch.where(ever, ids, -1), ids, mask),
        averaged=inversion(nearest_tokens(torch.stack([r.float() for r in releases]).mean(0), table), ids, mask),
    )
