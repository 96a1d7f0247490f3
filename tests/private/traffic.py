"""What a private step on sharded weights sends and holds, from shapes: the formulas of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weights:
    """Shapes of a model's parameters.

    Args:
        root: those that `fully_shard` of the model itself gathers, and `blocks` those of each block.
        trained: shapes of what is trained; all of it, if None.
    """

    root: Sequence[Shape]
    blocks: Sequence[Sequence[Shape]]
    trained: Sequence[Shape] | None = None

    @property
    def all(self) -> list[Shape]:
        """Every parameter."""
        return [*self.root, *(shape for block in self.blocks for shape in block)]

    @property
    def learned(self) -> list[Shape]:
        """Every trained parameter."""
        return self.all if self.trained is None else list(self.trained)


def padded(shapes: Sequence[Shape], ranks: int) -> int:
    """Numbers in all pieces together: the first axis is cut into equal pieces, the last of which are filled up."""
    return sum(ranks * -(-shape[0] // ranks) * prod(shape[1:]) for shape in shapes)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a micro-batch gathers and adds up, as the collectives see them; each rank sends (W - 1) / W of both."""

    gathered: int
    added: int


def traffic(weights: Weights, ranks: int, *, size: int = 4, two_pass: bool = False) -> Traffic:
    """Of one micro-batch whose sums are reduced.

    Args:
        size: bytes of a gathered number.
        two_pass: whether the backward pass runs twice, as it does where a checkpointed model is short of memory.
    """
    root, blocks = padded(weights.root, ranks), sum(padded(block, ranks) for block in weights.blocks)
    # What the root gathered is kept until the first backward pass is over.
    gathered = (2 * root + 3 * blocks) if two_pass else (root + 2 * blocks)
    return Traffic(size * gathered, 4 * padded(weights.learned, ranks))


def _whole_at_once(weights: Weights, ranks: int, *, two_pass: bool) -> int:
    """Numbers of the sum that is made, of its block, and of the block that is being reduced."""
    learned = set(weights.learned)
    root, *blocks = (
        padded([shape for shape in block if shape in learned], ranks) for block in (weights.root, *weights.blocks)
    )
    # Two passes meet a head first and an embedding last, and keep the root's sums meanwhile.
    order = blocks if two_pass else [root, *blocks]
    pairs = max(one + other for one, other in zip(order, [*order[1:], 0]))
    return pairs + max(prod(shape) for shape in weights.learned) + (root if two_pass else 0)


def held(weights: Weights, ranks: int, *, size: int = 4, moments: int = 2, two_pass: bool = False) -> dict[str, int]:
    """Bytes on one rank besides activations: pieces that stay, and what is whole for a moment.

    Args:
        size: bytes of a gathered number; trained pieces are float32, frozen ones of this size.
        moments: float32 numbers that the optimizer keeps of each trained parameter.
        two_pass: as in `traffic`.
    """
    learned = padded(weights.learned, ranks) // ranks
    frozen = 0 if weights.trained is None else padded(weights.all, ranks) // ranks - learned
    return {
        "pieces of weights": 4 * learned + size * frozen,
        "pieces of sums, then of gradients": 4 * learned,
        "the optimizer's": 4 * moments * learned,
        "whole sums at once": 4 * _whole_at_once(weights, ranks, two_pass=two_pass),
        "gathered weights": size * (padded(weights.root, ranks) + 2 * max(padded(b, ranks) for b in weights.blocks)),
    }
