"""Numbers that the host makes for a device: sent without waiting or, where they are the same in every step, there for ever."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_replay_tensors: list[torch.Tensor] | None = None


def copy_to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers on a device; the copy is queued, the host does not wait.

    While a step is recorded they are copied beside it instead, and kept: what is replayed finds them where they were, and no copy
    of memory that the host has long used for something else is part of it.
    """
    if _replay_tensors is None or device.type != "cuda" or numbers.device == device:
        return numbers.to(device, non_blocking=True)
    stream = _copy_stream(device)
    with torch.cuda.stream(stream):
        there = numbers.to(device)
    stream.synchronize()
    _replay_tensors.append(there)
    return there


def keep_for_replay(there: torch.Tensor) -> torch.Tensor:
    """A tensor that was on a device before, kept as well by a step that is recorded meanwhile: a cache may let go of it."""
    if _replay_tensors is not None:
        _replay_tensors.append(there)
    return there


def cached_constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A vector of these numbers, the same tensor for the same numbers: never to be written.

    The copy is queued. One that blocks, as ``torch.tensor(..., device=...)`` makes, waits for all that the device has to do.
    """
    return keep_for_replay(_cached_constant(numbers, dtype, device))


@functools.lru_cache(maxsize=512)
def _cached_constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return copy_to_device(torch.tensor(numbers, dtype=dtype), device)


@contextmanager
def keep_for_graph() -> Iterator[list[torch.Tensor]]:
    """What `copy_to_device` places meanwhile, to be held for as long as it may be read."""
    global _replay_tensors
    before, _replay_tensors = _replay_tensors, []
    try:
        yield _replay_tensors
    finally:
        _replay_tensors = before


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
