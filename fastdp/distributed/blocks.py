"""Reduce float32 sums over all processes, one block of `fully_shard` at a time, while the next block's sums are computed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fastdp.distributed import pieces
from fastdp.distributed.ranks import peers_required

Keep = Callable[[str, torch.Tensor], None]


class _Block:
    """The sums of one block's sharded parameters in one buffer, whose row r holds the pieces that rank r keeps."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], device: torch.device):
        self._parameters = parameters
        self.missing = set(parameters)
        one: Any = next(iter(parameters.values()))
        axes = [(one.device_mesh.get_group(axis), placement) for axis, placement in enumerate(one.placements)]
        self._group = next((group for group, placement in axes if placement.is_shard()), None)
        self._replicas = [group for group, placement in axes if not placement.is_shard()]
        ranks = 1 if self._group is None else self._group.size()
        self._sizes = [pieces.padded_numel(parameter) for parameter in parameters.values()]
        # [ranks, elements of one rank's pieces of all parameters]
        self.sums = torch.zeros(ranks, sum(self._sizes), device=device)
        self._columns = dict(zip(parameters, self.sums.split(self._sizes, 1)))
        self._own = self.sums[0] if self._group is None else self.sums.new_empty(sum(self._sizes))
        self._work: Any = None

    def add(self, name: str, total: torch.Tensor | None) -> None:
        """Add one parameter's whole sum; None where nothing was captured."""
        self.missing.discard(name)
        if total is None:
            return
        column = self._columns[name]
        flat = total.reshape(-1)
        if flat.numel() < column.numel():
            flat = torch.nn.functional.pad(flat, (0, column.numel() - flat.numel()))
        column.add_(flat.view(column.shape))

    def start(self) -> None:
        """Start the reduce-scatter; the host does not wait for it."""
        if self._group is None:
            return
        with peers_required():
            self._work = dist.reduce_scatter_single(self._own, self.sums.view(-1), group=self._group, async_op=True)

    def finish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This process's pieces of the totals, by name. On a GPU the stream waits for them, the host does not."""
        with peers_required():
            if self._work is not None:
                self._work.wait()
            for group in self._replicas:
                dist.all_reduce(self._own, group=group)
        for (name, parameter), own in zip(self._parameters.items(), self._own.split(self._sizes)):
            like = pieces.to_local(parameter)
            # A copy is aligned, and holds none of the others' memory.
            yield name, own[: like.numel()].view(like.shape).clone()


class BlockReducer:
    """Reduce sums of whole parameters to this process's pieces of the totals over all processes.

    All ranks reduce the blocks in the same order, whatever the order in which sums arrive. One is under way at a time.

    Args:
        blocks: parameters in pieces by name, of each block.
        device: of the sums.
        keep: called with each parameter's name and the piece that is kept of its sum.
    """

    def __init__(self, blocks: Sequence[Mapping[str, torch.Tensor]], device: torch.device, keep: Keep):
        self._blocks, self._device, self._keep = blocks, device, keep
        self._block_of = {name: number for number, block in enumerate(blocks) for name in block}
        self._open: dict[int, _Block] = {}
        self._next = 0
        self._under_way: _Block | None = None

    def add(self, name: str, total: torch.Tensor | None) -> None:
        """Take a parameter's complete sum, None for zeros, and begin to reduce blocks that are complete by now."""
        number = self._block_of.get(name)
        if number is not None:
            self._block(number).add(name, total)
        elif total is not None:
            self._keep(name, total)
        # The last block is the root's, whose embedding may be its head as well and come twice.
        while self._next < len(self._blocks) - 1 and self._next in self._open and not self._open[self._next].missing:
            self._start(self._next)
            self._next += 1

    def finish(self) -> None:
        """Reduce what is left, zeros where nothing came. Collective."""
        # What came again after its block was reduced is reduced on its own.
        for number in sorted({*self._open, *range(self._next, len(self._blocks))}):
            self._block(number)
            self._start(number)
        self._wait()
        self._next = 0

    def _block(self, number: int) -> _Block:
        if number not in self._open:
            self._open[number] = _Block(self._blocks[number], self._device)
        return self._open[number]

    def _start(self, number: int) -> None:
        self._wait()
        self._under_way = self._open.pop(number)
        self._under_way.start()

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        for name, piece in under_way.finish() if under_way is not None else ():
            self._keep(name, piece)


class CaptureOrder:
    """Record the order in which parameters are captured, so that ranks can compare it, and pass each capture on to a sink."""

    def __init__(self, sink: Any, names: Mapping[int, str]):
        self._sink, self._names = sink, names
        self._sequence: list[str] = []

    @property
    def checksum(self) -> int:
        """A number that ranks have in common if their captures came in the same order."""
        return zlib.crc32(repr(self._sequence).encode())

    def __getattr__(self, kind: str) -> Callable[..., None]:
        take = getattr(self._sink, kind)

        def record(parameter: torch.nn.Parameter, *captured: object) -> None:
            self._sequence.append(self._names[id(parameter)])
            take(parameter, *captured)

        return record


class LocalPieces:
    """Keep pieces of this process's own sums as `BlockReducer` does, but exchange nothing."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], keep: Keep):
        self._parameters, self._keep = parameters, keep

    def add(self, name: str, total: torch.Tensor | None) -> None:
        """Take a parameter's complete sum, None for zeros."""
        if total is not None:
            parameter = self._parameters[name]
            self._keep(name, pieces.part(total, parameter).clone() if pieces.is_dtensor(parameter) else total)

    def finish(self) -> None:
        """Nothing is left."""
