"""Checks of tensor arguments that every op shares: types, devices, and memory that is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Operands that the host reads, wherever the others are.
ON_HOST = frozenset(("position", "drawn", "offsets", "offsets1", "offsets2"))
#: Tensors that hold data of their own: not fake, functional or distributed.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
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


class Operands(NamedTuple):
    """What was passed for an op's operands.

    Args:
        tensors: one sequence an operand.
        device: of all but what the host reads.
        dispatched: whether torch's dispatcher has something to do: autograd, tensors without data of their own, negative views.
    """

    tensors: list[Sequence[Any]]
    device: torch.device | None
    dispatched: bool


def inspect(operands: Sequence[Operand], args: Sequence[Any], *, recorded: bool) -> Operands:
    """Look at every operand once: a step calls this a hundred times.

    Args:
        operands: of the op.
        args: its arguments; a stream may stand for a position.
        recorded: whether autograd records this op.

    Raises:
        TypeError: for what is no tensor.
        ValueError: unless all are on one device, or for a negated view that is written.
    """
    found: list[Sequence[Any]] = []
    first, device, dispatched = "", None, False
    for operand in operands:
        given = args[operand.index]
        if not operand.is_list:
            given = () if given is None and operand.is_optional else (given,)
        elif not isinstance(given, (list, tuple)):
            raise TypeError(f"{operand.name} must be a list of tensors, got {type(given).__name__}")
        found.append(given)
        for x in given:
            if type(x) not in _PLAIN:
                if not isinstance(x, Tensor):
                    if operand.name == "position":
                        continue
                    raise TypeError(f"{operand.name} must be a tensor, got {type(x).__name__}")
                dispatched = True
            elif x.is_neg():
                if operand.is_written:
                    raise ValueError(f"{operand.name} is a lazily negated view: pass resolve_neg() of it")
                dispatched = True
            if x.device != device and not (operand.name in ON_HOST and x.device.type == "cpu"):
                if device is not None:
                    raise ValueError(
                        f"{operand.name} is on {x.device} and {first} on {device}: move them to one device"
                    )
                first, device = operand.name, x.device
            dispatched = dispatched or (recorded and x.requires_grad)
    return Operands(found, device, dispatched)


def check_tensors(**given: Any) -> None:
    """Raise TypeError, naming the first that is not, unless all are tensors."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def check_written(operands: Sequence[Operand], passed: Operands) -> None:
    """Refuse to write tensors that autograd records, whose elements share memory, or that overlap another operand.

    Of many tensors, those that begin at one address are found; of a few, contiguous ones wherever they overlap.
    """
    written: list[tuple[str, Tensor]] = []
    read: list[tuple[str, Tensor]] = []
    recorded = torch.is_grad_enabled()
    for operand, tensors in zip(operands, passed.tensors):
        name = operand.name
        for x in tensors:
            if not operand.is_written:
                if isinstance(x, Tensor):
                    read.append((name, x))
                continue
            if x.is_meta:
                # Tensors without values have no addresses.
                return
            if recorded and x.requires_grad:
                raise RuntimeError(
                    f"{name} requires grad and would be changed in place: call this under torch.no_grad()"
                )
            if not x.is_contiguous() and _overlaps_itself(x):
                raise ValueError(f"elements of {name} may share memory: make it contiguous first")
            written.append((name, x))
    if len(written) + len(read) > _FEW:
        begins = [x.data_ptr() for _, x in written if x.numel()]
        if len({*begins}) < len(begins) or not {*begins}.isdisjoint([x.data_ptr() for _, x in read]):
            raise ValueError(f"{written[0][0]} and another operand share memory: give each tensor memory of its own")
        return
    extents = [(name, x.data_ptr(), x.nbytes, x.is_contiguous()) for name, x in (*written, *read)]
    for at, (name, begin, length, dense) in enumerate(extents[: len(written)]):
        for other, start, size, also_dense in extents[at + 1 :]:
            # The later of two dense ones begins behind the earlier; of others only the beginnings are compared.
            disjoint = start - begin >= length or begin - start >= size if dense and also_dense else begin != start
            if not disjoint and length and size:
                pair = f"two of {name}" if name == other else f"{name} and {other}"
                raise ValueError(f"{pair} share memory: give each tensor memory of its own")


def _overlaps_itself(x: Tensor) -> bool:
    reach = 0  # of the dimensions with shorter strides
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size > 1 and stride <= reach:
            return x.numel() > 0
        reach += stride * (size - 1)
    return False
