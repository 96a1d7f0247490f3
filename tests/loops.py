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


def train(private: Any, steps: int | None = None) -> None:
    """Train until so many logical steps are done; spend the whole budget by default."""
    steps = private.total_steps if steps is None else steps
    while private.steps_done < steps:
        for _ in trained(private):
            if private.steps_done >= steps and private.last_step_done:
                private.optimizer.zero_grad()
                return
