"""Checks of tensor arguments that every op shares: types, devices, and memory that is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Operands that the host reads, wherever the others are.
_ON_HOST = frozenset(("position", "drawn", "offsets", "offsets1", "offsets2"))
#: Tensors of which every pair is compared.
_FEW = 16


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument of an op, or a list of them, as its schema declares it."""

    index: int
    name: str
    is_list: bool
    is_optional: bool
    is_written: bool

    @classmethod
    def all_of(cls, arguments: Sequence[Any]) -> list[Operand]:
        """Those among the arguments of a schema."""
        kinds = [str(argument.type) for argument in arguments]
        return [
            cls(i, a.name, "List" in kind, "Optional" in kind, a.alias_info is not None and a.alias_info.is_write)
            for i, (a, kind) in enumerate(zip(arguments, kinds))
            if "Tensor" in kind
        ]

    def tensors(self, args: Sequence[Any]) -> Sequence[Any]:
        """What was passed for it, as a sequence; empty for None where that is allowed."""
        given = args[self.index]
        if self.is_list:
            if not isinstance(given, (list, tuple)):
                raise TypeError(f"{self.name} must be a list of tensors, got {type(given).__name__}")
            return given
        return () if given is None and self.is_optional else (given,)


def check_tensors(**given: Any) -> None:
    """Raise TypeError, naming the first that is not, unless all are tensors."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def check_devices(operands: Iterable[Operand], args: Sequence[Any]) -> None:
    """Raise ValueError unless all operands are on the device of the first; what the host reads may be on the CPU."""
    first = device = None
    for operand in operands:
        on_host = operand.name in _ON_HOST
        for x in operand.tensors(args):
            if on_host and (not isinstance(x, Tensor) or x.device.type == "cpu"):
                continue
            if device is None:
                first, device = operand.name, x.device
            elif x.device != device:
                raise ValueError(f"{operand.name} is on {x.device} and {first} on {device}: move them to one device")


def check_written(operands: Iterable[Operand], args: Sequence[Any]) -> None:
    """Refuse to write tensors that autograd records, whose elements share memory, or that overlap another operand.

    Of many tensors, those that begin at one address are found; of a few, contiguous ones wherever they overlap.
    """
    written = [(o.name, x) for o in operands if o.is_written for x in o.tensors(args)]
    if any(x.device.type == "meta" for _, x in written):
        # Tensors without values have no addresses.
        return
    recorded = torch.is_grad_enabled()
    for name, x in written:
        if recorded and x.requires_grad:
            raise RuntimeError(f"{name} requires grad and would be changed in place: call this under torch.no_grad()")
        if not x.is_contiguous() and _overlaps_itself(x):
            raise ValueError(f"elements of {name} may share memory: make it contiguous first")
    read = [(o.name, x) for o in operands if not o.is_written for x in o.tensors(args) if isinstance(x, Tensor)]
    if len(written) + len(read) > _FEW:
        begins = [x.data_ptr() for _, x in written if x.numel()]
        if len({*begins}) < len(begins) or not {*begins}.isdisjoint(x.data_ptr() for _, x in read):
            raise ValueError(f"{written[0][0]} and another operand share memory: give each tensor memory of its own")
        return
    extents = [(name, x.data_ptr(), x.nbytes, x.is_contiguous()) for name, x in (*written, *read)]
    for at, (name, begin, length, dense) in enumerate(extents[: len(written)]):
        for other, first, size, also_dense in extents[at + 1 :]:
            # The later of two dense ones begins behind the earlier; of others only the beginnings are compared.
            apart = first - begin >= length or begin - first >= size if dense and also_dense else begin != first
            if not apart and length and size:
                pair = f"two of {name}" if name == other else f"{name} and {other}"
                raise ValueError(f"{pair} share memory: give each tensor memory of its own")


def _overlaps_itself(x: Tensor) -> bool:
    reach = 0  # of the dimensions with shorter strides
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size > 1 and stride <= reach:
            return x.numel() > 0
        reach += stride * (size - 1)
    return False
