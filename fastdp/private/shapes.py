"""Micro-batches of public shapes: a fixed number of rows, each padded to a length of a public grid.

A matrix product rounds a row otherwise beside another number of rows, or at another length. Where every micro-batch of a
length has the same shape, a record changes which rows stand beside which, and nobody's arithmetic (docs/clipping.md).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fastdp.engine.layout import Ticket


class Piece(NamedTuple):
    """One micro-batch: the units in it, the length of its rows, and how many rows of weight 0 fill it up."""

    units: tuple[int, ...]
    length: int
    filled: int


def grid(longest: int, *, shortest: int = 16, ratio: float = 1.5) -> tuple[int, ...]:
    """Lengths from ``shortest`` on, each about ``ratio`` times the one before, up to ``longest``, which is public.

    Raises:
        ValueError: for lengths below 1 or a ratio that does not grow.

    >>> grid(100)
    (16, 24, 40, 64, 96, 100)
    """
    if not (shortest >= 1 and longest >= 1 and ratio > 1):
        raise ValueError("a grid needs lengths of at least 1 and a ratio above 1")
    lengths = [shortest]
    while lengths[-1] < longest:
        # Multiples of 8 are what matrix units like.
        lengths.append(max(lengths[-1] + 1, -(-int(lengths[-1] * ratio) // 8) * 8))
    return (*[length for length in lengths if length < longest], longest)


def pieces(
    drawn: Sequence[int], sizes: Callable[[int], tuple[int, int]], lengths: Sequence[int], rows: int
) -> list[Piece]:
    """Cut a logical batch into micro-batches of ``rows`` rows, each of units whose length on the grid is the same.

    A unit's place depends on its own length, and on how many of that length come before it; units of several rows fill a
    micro-batch of their own, so that no other unit stands beside a number of rows that it decides.

    Args:
        drawn: the units, in their order.
        sizes: of a unit its rows, and the tokens of the longest.
        lengths: of the grid, increasing.
        rows: of every micro-batch.

    Raises:
        ValueError: for a unit that is longer than the grid, or has more rows than fit.

    >>> pieces([0, 1, 2], lambda unit: (1, [5, 20, 7][unit]), (8, 32), 2)
    [Piece(units=(0, 2), length=8, filled=0), Piece(units=(1,), length=32, filled=1)]
    """
    found: dict[int, list[int]] = {length: [] for length in lengths}
    alone: dict[int, list[Piece]] = {length: [] for length in lengths}
    for unit in drawn:
        own, tokens = sizes(unit)
        at = bisect.bisect_left(lengths, tokens)
        if at == len(lengths):
            raise ValueError(f"a unit of {tokens} tokens is longer than the grid's {lengths[-1]}; truncate the texts")
        if own > rows:
            raise ValueError(f"a unit of {own} rows does not fit into {rows}; raise max_physical_batch_size")
        if own == 1:
            found[lengths[at]].append(unit)
        else:
            alone[lengths[at]].append(Piece((unit,), lengths[at], rows - own))
    cut: list[Piece] = []
    for length in lengths:
        for start in range(0, len(found[length]), rows):
            units = tuple(found[length][start : start + rows])
            cut.append(Piece(units, length, rows - len(units)))
        cut.extend(alone[length])
    return cut


def ticket_of(piece: Piece, rows_of: Callable[[int], int], *, is_last: bool) -> Ticket:
    """The ticket of a micro-batch: its units with weight 1, and a unit of weight 0 for each row that fills it up."""
    counts = [*(rows_of(unit) for unit in piece.units), *[1] * piece.filled]
    row_units = torch.tensor([unit for unit, count in enumerate(counts) for _ in range(count)], dtype=torch.int64)
    weights = torch.tensor([1.0] * len(piece.units) + [0.0] * piece.filled)
    return Ticket(row_units, weights, is_last)


def padded(batch: dict[str, Any], length: int, filled: int, fill: dict[str, int], pad: int = 0) -> dict[str, Any]:
    """A collated batch with rows of ``length`` tokens, and ``filled`` rows more, copies of nobody's.

    Args:
        batch: tensors [rows, tokens] of one length, which is padded on the right, and others [rows, ...].
        length: at least the batch's.
        filled: rows to be added: those of tokens hold the fill alone, with a first token that counts as one, so that no
            attention is over nothing; others are zero.
        fill: of fields that are not padded with ``pad``: ``{"labels": -100}``.

    Raises:
        ValueError: for tokens beyond ``length``.

    >>> batch = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2, dtype=torch.int64)}
    >>> padded(batch, 3, 1, {})["attention_mask"]
    tensor([[1, 1, 0],
            [1, 0, 0]])
    """
    tokens = batch["input_ids"].shape[1]
    if tokens > length:
        raise ValueError(
            f"the collator made rows of {tokens} tokens, and the grid has {length}; leave padding to the grid"
        )
    out = {}
    for name, field in batch.items():
        if not isinstance(field, torch.Tensor) or field.dim() == 0:
            out[name] = field
            continue
        rows = field.shape[0] + filled
        by_token = field.dim() > 1 and field.shape[1] == tokens
        shape = (rows, length, *field.shape[2:]) if by_token else (rows, *field.shape[1:])
        made = field.new_full(shape, fill.get(name, 0 if name == "attention_mask" else pad) if by_token else 0)
        if by_token:
            made[: field.shape[0], :tokens] = field
        else:
            made[: field.shape[0]] = field
        if name == "attention_mask":
            made[field.shape[0] :, 0] = 1
        out[name] = made
    return out
