"""Numbers that the host makes for a device: sent without waiting or, where they are the same in every step, there for ever."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_kept: list[torch.Tensor] | None = None


def placed(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers on a device; the copy is queued, the host does not wait.

    While a step is recorded they are copied beside it instead, and kept: what is replayed finds them where they were, and no copy
    of memory that the host has long used for something else is part of it.
    """
    if _kept is None or device.type != "cuda" or numbers.device == device:
        return numbers.to(device, non_blocking=True)
    stream = _beside(device)
    with torch.cuda.stream(stream):
        there = numbers.to(device)
    stream.synchronize()
    _kept.append(there)
    return there


def held(there: torch.Tensor) -> torch.Tensor:
    """A tensor that was `placed` before, kept as well by a step that is recorded meanwhile: a cache may let go of it."""
    if _kept is not None:
        _kept.append(there)
    return there


def sent(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A vector of these numbers, the same tensor for the same numbers: never to be written.

    The copy is queued. One that blocks, as ``torch.tensor(..., device=...)`` makes, waits for all that the device has to do.
    """
    return held(_sent(numbers, dtype, device))


@functools.lru_cache(maxsize=512)
def _sent(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return placed(torch.tensor(numbers, dtype=dtype), device)


@contextmanager
def keeping() -> Iterator[list[torch.Tensor]]:
    """What is `placed` meanwhile, to be held for as long as it may be read."""
    global _kept
    before, _kept = _kept, []
    try:
        yield _kept
    finally:
        _kept = before


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
