"""Local methods: privacy enters before or inside the forward pass, and what leaves is counted there.

Frozen settings are opened on a public model or tokenizer. What `open` returns makes the releases, counts them, and states their
cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fastdp.accounting import Card, Claim


class Releases:
    """An opened perturbation, or another source of privacy, as a program that trains a model speaks to it.

    What is here is the answer of one that leaves examples and training alone.
    """

    #: Tokens of every padded sequence, where batches of other lengths would give lengths away.
    padded_length: int | None = None
    #: Whether each record takes part in each pass, as it has been released for it.
    once_an_epoch: bool = True
    #: Name of the file of the card, without its ending.
    card_name: str = "card"
    #: Noise std over the clipping bound, where there is such a thing.
    noise_multiplier: float = math.nan

    def examples(self, items: Sequence[Mapping[str, Any]], *, training: bool) -> list[dict[str, Any]]:
        """Encoded examples as the model may see them; those not for training are queries."""
        return [dict(item) for item in items]

    def follow(self, run: Any) -> None:
        """The engine's run of the training begins; what is released before it needs to know nothing of that."""

    def set_epoch(self, epoch: int) -> None:
        """A pass over the training examples begins, counted from 1."""

    def trained_parameters(self) -> list[nn.Parameter]:
        """What may be trained beside the model's own parameters."""
        return []

    def flaws(self) -> list[str]:
        """Why there is no guarantee; empty if there is."""
        return []

    def epsilon(self) -> float:
        """What was spent on a record so far, inf where the bound is no epsilon."""
        return math.inf

    def claim(self) -> Claim:
        """What is guaranteed."""
        # Without one of its own there is nothing true to state.
        raise NotImplementedError(f"{type(self).__name__} says nowhere what it guarantees: define claim()")

    def card(self) -> Card:
        """The claim with all that it depends on."""
        # Nor is there a card to fall back on: an empty one would read as a statement.
        raise NotImplementedError(f"{type(self).__name__} has no card: define card()")

    def in_words(self) -> str | None:
        """One sentence about the guarantee, or why there is none; None if an epsilon says it all."""
        return f"none: {'; '.join(self.flaws())}" if self.flaws() else self.figure()

    def figure(self) -> str | None:
        """The guarantee as a figure with its unit; None if an epsilon says it all."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What must be kept beside the model's weights."""
        return {}

    @property
    def untouched(self) -> bool:
        """Whether nothing was released that a ledger holds."""
        return True

    def remove(self) -> None:
        """Leave the model as it was."""

    def discard(self) -> None:
        """`remove`, and leave no record behind of a run that released nothing."""
        self.remove()
