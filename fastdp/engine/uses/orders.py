"""Tokens that a sort puts into another order, and that its inverse puts back, as mixtures of experts do.

Which expert a token goes to depends on the data, so tokens sorted by expert belong to rows that no shape tells. After the
inverse of the same permutation they stand where they stood, whatever the data were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastdp.calls.marks import Marks
from fastdp.engine.uses.selections import GROUPED

_SORTS = frozenset({torch.sort, torch.Tensor.sort, torch.argsort, torch.Tensor.argsort})
_GETS = frozenset({torch.Tensor.__getitem__})


class Orders:
    """Which permutation decides the first axis of a tensor, and nothing else about it."""

    def __init__(self) -> None:
        #: By their identity; they are held, so that no other takes the place of one in memory.
        self._permutations: dict[int, torch.Tensor] = {}
        self._of: Marks[int] = Marks()
        self._inverses: Marks[int] = Marks()

    def restores(self, func: Any, args: Any) -> bool:
        """Whether an operation puts tokens back to where a sort had taken them from."""
        if func not in _GETS or not isinstance(args[1], torch.Tensor):
            return False
        inverse = self._inverses.get(args[1])
        return inverse is not None and inverse == self._of.get(args[0])

    def follow(
        self,
        func: Any,
        args: Any,
        given: list[torch.Tensor],
        results: list[torch.Tensor],
        chosen: Callable[[Any], bool],
    ) -> None:
        """Note the permutation of an operation's results; ``chosen`` says of a tensor whether the data decide its first axis."""
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        found = None
        if func in _SORTS and first is not None and first.dim() == 1:
            permutation = results[-1]
            if self._of.get(first) == id(first):
                self._inverses[permutation] = id(first)
            elif not chosen(first):
                self._permutations[id(permutation)] = permutation
                found = id(permutation)
        elif func is torch.Tensor.__setitem__ and first is not None and isinstance(args[1], torch.Tensor):
            where, value = id(args[1]), args[2]
            plain = isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape == args[1].shape
            if where in self._permutations and plain and first.shape == value.shape:
                self._inverses.pop(first)
                if torch.equal(value, torch.arange(value.shape[0], device=value.device)):
                    self._inverses[first] = where
            return
        elif func in _GETS and isinstance(args[1], torch.Tensor) and not chosen(first):
            found = self._of.get(args[1])
        else:
            ordered = given[:1] if func in GROUPED else [t for t in given if chosen(t)]
            kinds = {self._of.get(t) for t in ordered}
            found = kinds.pop() if len(kinds) == 1 else None
        for result in results:
            self._of.pop(result)
            length = None if found is None else self._permutations[found].shape[0]
            if found is not None and result.dim() and result.shape[0] == length:
                self._of[result] = found
