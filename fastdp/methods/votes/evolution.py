"""Evolving candidates by private votes: keep what was voted for, vary it, and vote again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fastdp.methods.votes.mechanism import PrivateVotes
from fastdp.validate import at_least

Generate = Callable[[str, int], list[str]]
Vary = Callable[[str, list[str]], list[str]]


def evolve(
    votes: PrivateVotes,
    generate: Generate,
    vary: Vary,
    count: int,
    *,
    variations: int = 2,
    threshold: float = 0.0,
    seed: int = 0,
) -> dict[str, list[str]]:
    """Texts that private records voted for: all rounds of private evolution (arXiv 2403.01749, algorithm 1).

    What comes out is post-processing of the noised counts, and public.

    Args:
        votes: opened on the private records; all its rounds are spent.
        generate: (label, k) -> k public candidates of a label, from any model.
        vary: (label, texts) -> a variation of each text.
        count: texts of each label that are kept in a round.
        variations: how many candidates stand in each place: a kept text and its variations.
        threshold: noised counts up to this many votes count as none.
        seed: of the draw among what was voted for.
    """
    at_least(1, count=count, variations=variations)
    draw = torch.Generator().manual_seed(seed)
    pool = {
        label: _asked(generate(label, count * variations), count * variations, "generate") for label in votes.labels
    }
    kept: dict[str, list[str]] = {}
    at_least(1, rounds_left=votes.ledger.remaining())
    for _ in range(votes.ledger.remaining()):
        for label, noised in votes.count(pool).items():
            weights = (noised - threshold).clamp(min=0)
            # Where noise left nobody, all are as good.
            weights = weights if float(weights.sum()) > 0 else torch.ones_like(weights)
            places = torch.multinomial(weights, count, replacement=True, generator=draw).tolist()
            kept[label] = [pool[label][place] for place in places]
        pool = {label: _with_variations(vary, label, texts, variations) for label, texts in kept.items()}
    return kept


def _with_variations(vary: Vary, label: str, texts: list[str], variations: int) -> list[str]:
    return texts + [text for _ in range(variations - 1) for text in _asked(vary(label, texts), len(texts), "vary")]


def _asked(texts: Sequence[str], count: int, name: str) -> list[str]:
    if len(texts) != count:
        raise ValueError(f"{name} gave {len(texts)} texts where {count} were asked for")
    return list(texts)
