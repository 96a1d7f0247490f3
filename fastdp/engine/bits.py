"""Numbers of tensors, compared as bits: a few at places that are drawn anew each time, or all of them, added up."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from fastdp.engine.pieces import piece, writes

#: Columns of the table in which bits are added up.
_WIDE = 512
#: Numbers of a tensor that are looked at at once.
_SPOT = 16
#: Draws the places.
DRAW = random.Random(random.SystemRandom().getrandbits(128))
#: Devices whose tensors have no numbers.
NUMBERLESS = frozenset({"meta"})


class _Spot(NamedTuple):
    """Neighbouring numbers of a tensor, and where it lay, and how often it was written, when they were chosen."""

    name: str
    tensor: torch.Tensor
    version: int
    address: int
    size: int
    start: int
    numbers: torch.Tensor

    def now(self) -> torch.Tensor:
        """The numbers at the same place, wherever the tensor lies now."""
        if self.tensor.data_ptr() == self.address:
            return self.numbers
        return self.tensor.detach().as_strided((self.size,), (1,), self.start)


class Spots:
    """A few neighbouring numbers of each of some tensors, at places that nobody knows beforehand, as they are now."""

    @torch.no_grad()
    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]):
        self._places: dict[tuple[torch.device, torch.dtype], list[_Spot]] = {}
        for name, tensor in named:
            count = tensor.numel()
            size = min(_SPOT, count)
            start = int(tensor.storage_offset()) + int(DRAW.random() * (count - size + 1))
            numbers = tensor.as_strided((size,), (1,), start)
            spot = _Spot(name, tensor, tensor._version, tensor.data_ptr(), size, start, numbers)
            self._places.setdefault((tensor.device, tensor.dtype), []).append(spot)
        self._values = [_bytes([spot.numbers for spot in spots]) for spots in self._places.values()]

    def compare(self) -> Iterator[tuple[list[str | None], list[int], torch.Tensor]]:
        """Where numbers are others now though torch counted no write: for tensors of a kind their names, how many flags
        each has, and the flags, on their device. What torch counted a write into is for others to judge, and has no name.

        Raises RuntimeError at once, naming it, for a tensor that lies elsewhere or is smaller.
        """
        for (kind, spots), before in zip(self._places.items(), self._values):
            for spot in spots:
                tensor = spot.tensor
                end = tensor.storage_offset() + tensor.numel()
                if (tensor.device, tensor.dtype) != kind or spot.start + spot.size > end:
                    raise moved(spot.name)
            differ = _bytes([spot.now() for spot in spots]) != before
            width = spots[0].numbers.element_size()
            names = [spot.name if spot.tensor._version == spot.version else None for spot in spots]
            yield names, [spot.size * width for spot in spots], differ


def _bytes(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of vectors of one dtype, one behind the other: a copy."""
    return torch.cat(list(parts)).view(torch.uint8)


def readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers lie plainly in memory."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return (
        plain
        and tensor.device.type not in NUMBERLESS
        and not tensor.is_quantized
        and not tensor.is_complex()
        and tensor.numel() > 0
        and (tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor))
    )


def contents(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[int, int, int]]:
    """What tells whether tensors were written to or replaced, by name.

    Bits are added up, by place, so that writes through ``.data``, which torch does not count, are seen as well.
    """
    found = {name: (id(tensor), writes(tensor), total(piece(tensor))) for name, tensor in named}
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for *_, bits in found.values():
        sums.setdefault(bits.device, []).append(bits)
    # One wait for each device, not for each tensor.
    told = {device: iter(torch.stack(own).tolist()) for device, own in sums.items()}
    return {name: (*known, next(told[bits.device])) for name, (*known, bits) in found.items()}  # type: ignore[misc]


def total(tensor: torch.Tensor) -> torch.Tensor:
    """A sum of the bits of a tensor's numbers, modulo 2^64, in which no two places count alike: int64 [], where they lie."""
    bits = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().reshape(-1).view(torch.uint8)
    head = bits.shape[0] // (8 * _WIDE) * 8 * _WIDE
    rest = bits[head:].long()
    whole = (rest * _odd(rest)).sum()
    if head:
        table = bits[:head].view(torch.int64).view(-1, _WIDE)
        for sums in (table.sum(0), table.sum(1)):
            whole += (sums * _odd(sums)).sum()
    return whole


def _odd(like: torch.Tensor) -> torch.Tensor:
    """A different odd number for each place."""
    return (2 * torch.arange(like.shape[0], device=like.device) + 1) * 0x9E3779B97F4A7C1


def moved(name: str) -> RuntimeError:
    """What is raised for a tensor that is another than it was."""
    return RuntimeError(
        f"{name} was changed outside of a release, so no noise covers it: let the private optimizer alone change the model; "
        "after loading released weights call private.load_state_dict, or detach() and make the run private anew"
    )
