"""The plain loop over a private loader."""

from collections.abc import Callable
from typing import Any

Loss = Callable[[Any, Any], Any]


def own_loss(model, batch):
    """The loss that a model returns."""
    return model(**batch)["loss"]


def trained(private, epochs=1, loss=own_loss):
    """Train on each micro-batch of some epochs; yields it after its step, whose gradients are still there."""
    for _ in range(epochs):
        for batch in private.data_loader:
            loss(private.model, batch).backward()
            private.optimizer.step()
            yield batch
            private.optimizer.zero_grad()


def train_epoch(private, loss=own_loss):
    """Train on each micro-batch of one epoch."""
    for _ in trained(private, loss=loss):
        pass


def train(private, steps=None):
    """Train until so many logical steps are done; spend the whole budget by default."""
    steps = private.total_steps if steps is None else steps
    while private.steps_done < steps:
        for _ in trained(private):
            if private.steps_done >= steps and private.last_step_done:
                private.optimizer.zero_grad()
                return
