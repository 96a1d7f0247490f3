"""Looking into a forward call's arguments: their rows, and the same call on some of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists and mappings."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict) or hasattr(tree, "items"):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors(value)


def map_tensors(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nesting with every tensor replaced."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        copy = {key: map_tensors(value, function) for key, value in tree.items()}
        return copy if type(tree) is dict else type(tree)(copy)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, function) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(value, function) for value in tree)
    return tree


def has_rows(tree: Any, rows: int) -> bool:
    """Whether some tensor has ``rows`` as its first size."""
    return any(t.dim() > 0 and t.shape[0] == rows for t in tensors(tree))


def take_rows(tree: Any, index: torch.Tensor, rows: int) -> Any:
    """The call on the rows ``index`` alone; tensors whose first size is not ``rows`` are left as they are."""

    def take(t: torch.Tensor) -> torch.Tensor:
        return t.index_select(0, index.to(t.device)) if t.dim() > 0 and t.shape[0] == rows else t

    return map_tensors(tree, take)


def take_tokens(tree: Any, row: int, start: int, end: int, shape: tuple[int, int]) -> Any:
    """The call on one packed unit: tokens [start, end) of a row, as a batch of one."""

    def take(t: torch.Tensor) -> torch.Tensor:
        return t[row : row + 1, start:end] if tuple(t.shape[:2]) == shape else t

    return map_tensors(tree, take)
