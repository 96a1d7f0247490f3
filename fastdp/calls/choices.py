"""Which rows and columns of a matrix an indexing operation chooses."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fastdp.calls.batches import tensors
from fastdp.calls.marks import Marks
from fastdp.calls.randomness import version


class Sides(NamedTuple):
    """Whole rows and columns, by their numbers, or None for all in order; ``swapped`` if the result has them the other way."""

    swapped: bool
    chosen: list[torch.Tensor | None]
    sizes: tuple[int, int]


#: The latest choice by an index tensor: comparing numbers on a device waits for it, and cannot be recorded.
_CHOICES: Marks[tuple[Any, Sides | None]] = Marks()


def chosen_sides(func: Any, first: torch.Tensor, args: Any, kwargs: Any, part: int | None) -> Sides | None:
    """What ``func(first, *args[1:], **kwargs)``, or a ``part`` of its results, chooses; None for anything but whole sides.

    The choice by an index tensor, as by a model's buffer, is found once for as long as the tensor is not written.
    """
    index = next((t for t in tensors((args[1:], kwargs)) if t.dim()), None)
    if index is None or len(args) > 2 or args[1] is not index or kwargs:
        # The numbers lie on the host unless an index lies elsewhere.
        return _sides(func, first, args, kwargs, part, torch.device("cpu") if index is None else index.device)
    holder = index if index._base is None else index._base
    key = func, part, first.shape, index.shape, index.stride(), index.storage_offset(), version(index)
    found = _CHOICES.get(holder)
    if found is None or found[0] != key:
        found = _CHOICES[holder] = key, _sides(func, first, args, kwargs, part, index.device)
    return found[1]


def _sides(
    func: Any, first: torch.Tensor, args: Any, kwargs: Any, part: int | None, device: torch.device
) -> Sides | None:
    """Found by doing the same to the numbers of rows and columns."""
    if first.dim() < 2:
        return None
    shape = first.shape
    sizes = shape[0], shape[1:].numel()
    of_rows = torch.arange(sizes[0], device=device).view(-1, *[1] * (len(shape) - 1)).expand(shape)
    of_columns = torch.arange(sizes[1], device=device).view(1, *shape[1:]).expand(shape)
    done = [func(t, *args[1:], **kwargs) for t in (of_rows, of_columns)]
    rows, columns = ((d if part is None else d[part]).flatten(1) for d in done)
    swapped = not _is_constant(rows, 1)
    rows, columns = (rows.t(), columns.t()) if swapped else (rows, columns)
    if not rows.numel() or not (_is_constant(rows, 1) and _is_constant(columns, 0)):
        return None
    pairs = zip((rows[:, 0], columns[0]), sizes)
    return Sides(swapped, [None if torch.equal(i, torch.arange(n, device=device)) else i for i, n in pairs], sizes)


def _is_constant(numbers: torch.Tensor, axis: int) -> bool:
    """Whether the numbers do not change along an axis."""
    return numbers.stride(axis) == 0 or torch.equal(numbers, numbers.narrow(axis, 0, 1).expand_as(numbers))
