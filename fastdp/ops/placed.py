"""Numbers that the host makes for a device: sent without waiting or, where they are the same in every step, there for ever."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_replay_tensors: list[torch.Tensor] | None = None


def copy_to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers on a device; the copy is queued, the host does not wait.

    While a step is recorded they are copied beside it instead, and kept. What is replayed finds them where they were, and copies
    no memory that the host has used for something else since.
    """
    if _replay_tensors is None or device.type != "cuda" or numbers.device == device:
        return numbers.to(device, non_blocking=True)
    stream = _copy_stream(device)
    with torch.cuda.stream(stream):
        there = numbers.to(device)
    stream.synchronize()
    _replay_tensors.append(there)
    return there


class ReplayCache(dict[Any, torch.Tensor]):
    """Tensors on devices by what they are made of, never to be written; a recorded step keeps those that it may read.

    One that is there is found without a call, as a step asks for dozens. ``make`` makes one of the parts of its key.
    """

    def __init__(self, make: Callable[..., torch.Tensor], most: int):
        super().__init__()
        self._make, self._most = make, most
        _caches.append(self)

    def __missing__(self, key: tuple[Any, ...]) -> torch.Tensor:
        if len(self) >= self._most:
            if _replay_tensors is not None:
                _replay_tensors.extend(self.values())
            self.clear()
        made = self[key] = self._make(*key)
        return made


_caches: list[ReplayCache] = []


def _constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return copy_to_device(torch.tensor(numbers, dtype=dtype), device)


#: Vectors by their numbers, dtype and device. Copies are queued: one that blocks, as ``torch.tensor(..., device=...)`` makes,
#: waits for all that the device has to do.
CONSTANTS = ReplayCache(_constant, 512)


@contextmanager
def keep_for_graph() -> Iterator[list[torch.Tensor]]:
    """What is placed on a device, or found there, meanwhile: to be held for as long as it may be read."""
    global _replay_tensors
    before, _replay_tensors = _replay_tensors, []
    try:
        yield _replay_tensors
    finally:
        for cache in _caches:
            _replay_tensors.extend(cache.values())
        _replay_tensors = before


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
