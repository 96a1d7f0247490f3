"""What is known of single tensors, for as long as they live."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Marks(Generic[T]):
    """Values by the identity of tensors, none of which is kept in memory by it.

    A forward pass that is followed would otherwise hold everything that it computes, which is many times what a training
    step holds: most of all where checkpointing lets go of it. A tensor that is gone takes its mark along, before another
    can take its place in memory.
    """

    def __init__(self, marked: Iterable[tuple[torch.Tensor, T]] = ()):
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], T]] = {}
        for tensor, value in marked:
            self[tensor] = value

    def __del__(self) -> None:
        # The references know the dictionary that holds them, and values may hold tensors that this cycle would keep.
        self._found.clear()

    def __setitem__(self, tensor: torch.Tensor, value: T) -> None:
        key = id(tensor)
        self._found[key] = weakref.ref(tensor, partial(self._found.pop, key)), value

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._found

    def has_any(self, tensors: Iterable[object]) -> bool:
        """Whether one of these tensors has a mark."""
        return not self._found.keys().isdisjoint(map(id, tensors))

    def __getitem__(self, tensor: torch.Tensor) -> T:
        return self._found[id(tensor)][1]

    def get(self, tensor: object) -> T | None:
        """The value of a tensor, None without a mark."""
        found = self._found.get(id(tensor))
        return None if found is None else found[1]

    def pop(self, tensor: torch.Tensor) -> None:
        """Forget a tensor, if it has a mark."""
        self._found.pop(id(tensor), None)
