"""A model in training or in evaluation for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def in_mode(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """The model in this mode, and afterwards in the one that it was in."""
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)
