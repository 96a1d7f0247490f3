"""A tensor in pieces over several processes, as torch's `DTensor` holds it: which piece is here, and what it is a piece of.

Every function takes a tensor that this process has as a whole as well: it is one piece.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in pieces, or might be."""
    return hasattr(tensor, "placements")


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor, for reading and for writing: no copy, and nothing that autograd follows."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        return cast(Any, tensor).to_local()  # type: ignore[no-any-return]


def writes(tensor: torch.Tensor) -> int:
    """How often torch counted a write into a tensor, or into its piece."""
    return tensor._version + (to_local(tensor)._version if is_dtensor(tensor) else 0)


def _rows(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Of a tensor's first axis: where its piece begins and ends, and the rows of a piece before the last ones."""
    held: Any = tensor
    for axis, placement in enumerate(held.placements):
        if placement.is_shard():
            count, size = tensor.shape[0], held.device_mesh.size(axis)
            most = -(-count // size)
            start = min(most * held.device_mesh.get_local_rank(axis), count)
            return start, min(start + most, count), most
    return 0, tensor.shape[0], tensor.shape[0]


def first(tensor: torch.Tensor) -> int:
    """Where the piece begins in the flattened tensor."""
    return _rows(tensor)[0] * math.prod(tensor.shape[1:]) if is_dtensor(tensor) else 0


def part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a tensor of ``like``'s shape that lies where its piece does; a view."""
    if not is_dtensor(like):
        return whole
    start, end, _ = _rows(like)
    return whole[start:end]


def row(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """The row ``index`` of a tensor's first axis where its piece holds it, and no row elsewhere: a view."""
    start = _rows(tensor)[0] if is_dtensor(tensor) else 0
    held = to_local(tensor)
    return held[index - start : index - start + 1] if start <= index < start + len(held) else held[:0]


def padded_numel(tensor: torch.Tensor) -> int:
    """The numbers of a piece before the last ones, to which all are filled up where they are exchanged."""
    return _rows(tensor)[2] * math.prod(tensor.shape[1:])


def counts(tensor: torch.Tensor) -> bool:
    """Whether it is for this process to count the numbers of its piece, of which others may have replicas."""
    held: Any = tensor
    return all(
        placement.is_shard() or held.device_mesh.get_local_rank(axis) == 0
        for axis, placement in enumerate(held.placements)
    )


def from_piece(own: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor in pieces as ``like`` is, of which ``own`` is the piece here."""
    if not is_dtensor(like):
        return own
    from torch.distributed.tensor import DTensor

    held: Any = like
    return DTensor.from_local(
        own, held.device_mesh, held.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, from all its pieces. Collective."""
    plain: Any = tensor.detach()
    return plain.full_tensor() if is_dtensor(tensor) else plain  # type: ignore[no-any-return]
