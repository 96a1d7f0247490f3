"""The plain loop over a private loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def trained(private: Any, epochs: int = 1) -> Iterator[Any]:
    """Train on each micro-batch of some epochs; yields it after its step, whose gradients are still there."""
    for _ in range(epochs):
        for batch in private.data_loader:
            private.model(**batch)["loss"].backward()
            private.optimizer.step()
            yield batch
            private.optimizer.zero_grad()


def train(private: Any) -> None:
    """Spend the whole budget."""
    while private.steps_done < private.total_steps:
        for _ in trained(private):
            pass
