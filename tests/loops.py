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


def train(private: Any, epochs: int = 1, steps: float = float("inf")) -> None:
    """Train for some epochs, until so many releases are made."""
    for _ in trained(private, epochs):
        if private.last_step_done and private.steps_done >= steps:
            break
