"""The processes that train together: one draw, one sum, one ledger, so that what they release is what one process would.

Everything that a run with several processes does otherwise than a run with one is here. Each method is the identity for one
process. All of them are collective: every rank calls the same ones in the same order.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
#: Bytes of sums that travel together.
_BUCKET = 1 << 25
_SINGLE_PROCESS: ContextVar[bool] = ContextVar("alone", default=False)


class RankLost(RuntimeError):
    """Another process of the group ended, or can no longer be reached."""


@dataclass(frozen=True)
class _Failure:
    """What a rank could not do."""

    rank: int
    error: Exception


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together.

    Args:
        rank: its number, from 0. Rank 0 makes the keys and keeps the ledger.
        size: how many there are.
        standalone: whether this process keeps to itself, whatever its group does.
    """

    rank: int = 0
    size: int = 1
    standalone: bool = False

    @classmethod
    def here(cls) -> Ranks:
        """Those of torch's default process group; one process, where there is none or within `single_process`."""
        if _SINGLE_PROCESS.get() or not (dist.is_available() and dist.is_initialized()):
            return cls(standalone=_SINGLE_PROCESS.get())
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def leads(self) -> bool:
        """Whether this is the rank that keeps the ledger."""
        return self.rank == 0

    def require_current(self) -> None:
        """Raise RuntimeError if processes have come together, or parted, since the run was made private."""
        now = Ranks.here()
        if now.size != self.size and not self.standalone:
            raise RuntimeError(
                f"the run was made private in a group of {self.size} and there are {now.size} processes now: "
                "open the process group first, then call make_private."
            )

    def enter(self) -> None:
        """A training forward pass begins in a group: a wrapper of data parallelism round it will exchange nothing.

        Raises as `require_current`.
        """
        self.require_current()
        wrapper = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
        if wrapper is not None:
            pass_through(wrapper)

    def shares(self, drawn: Sequence[int]) -> list[list[int]]:
        """The units of a logical batch that each rank takes: every ``size``-th."""
        return [list(drawn[rank :: self.size]) for rank in range(self.size)]

    def gather(self, value: T) -> list[T]:
        """What each rank has, in their order."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with peers_required():
            dist.all_gather_object(found, value)
        return found

    def numbers(self, number: int, device: torch.device) -> list[int]:
        """A whole number of each rank, in their order: one message, by way of a device that the group can reach."""
        if self.size == 1:
            return [number]
        found = torch.empty(self.size, dtype=torch.int64, device=device)
        with peers_required():
            dist.all_gather_single(found, torch.tensor([number], device=device))
        return found.tolist()  # type: ignore[no-any-return]

    def first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank. Raises on all of them what it raises on rank 0."""
        if self.size == 1:
            return make()
        said: list[Any] = [None]
        if self.leads:
            try:
                said = [make()]
            except Exception as error:
                said = [_Failure(0, _portable(error))]
        with peers_required():
            dist.broadcast_object_list(said, src=0)
        if isinstance(said[0], _Failure):
            raise said[0].error
        return said[0]  # type: ignore[no-any-return]

    def open_on_first(self, open_it: Callable[[], T], mirrored: Callable[[T], T]) -> T:
        """What rank 0 opens; on the others, what ``mirrored`` makes of it."""
        opened: list[T] = []

        def begin() -> T:
            opened.append(open_it())
            return opened[0] if self.size == 1 else mirrored(opened[0])

        copied = self.first(begin)
        return opened[0] if opened else copied

    def key(self) -> bytes:
        """32 bytes of rank 0's operating system, known to this group and to nobody else."""
        return self.first(lambda: os.urandom(32))

    @contextmanager
    def together(self, stated: Mapping[str, Any] | None = None) -> Iterator[set[str]]:
        """What is done meanwhile is done by all ranks or by none: the first failure is raised on each of them.

        Nothing that waits for other ranks belongs inside. ``stated`` must be the same everywhere, as in `require_alike`.
        Yields a set for what this rank wants, which afterwards holds what any rank wants.
        """
        failure: _Failure | None = None
        wanted: set[str] = set()
        try:
            yield wanted
        except Exception as error:
            if self.size == 1:
                raise
            failure = _Failure(self.rank, _portable(error))
        if self.size == 1:
            return
        said = self.gather((failure, dict(stated or {}), wanted))
        failures = [each for each, _, _ in said if each is not None]
        if failures:
            raise (failure or failures[0]).error
        _require_alike([other for _, other, _ in said])
        wanted.update(*(others for _, _, others in said))

    def require_alike(self, stated: Mapping[str, Any]) -> None:
        """Raise ValueError, naming the first, if ranks state different things."""
        _require_alike(self.gather(dict(stated)))

    def add(self, sums: dict[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> None:
        """Replace float32 sums by those over all ranks; a rank that has none of a name adds nothing.

        Args:
            sums: by name.
            like: tensors of every name's shape and device, in one order on all ranks.
        """
        if self.size == 1:
            return
        for bucket in _buckets(like):
            parts = [sums.get(name) for name in bucket]
            flat = torch.cat(
                [
                    torch.zeros(like[n].numel(), device=like[n].device) if p is None else p.reshape(-1)
                    for n, p in zip(bucket, parts)
                ]
            )
            with peers_required():
                dist.all_reduce(flat)
            for name, part in zip(bucket, flat.split([like[n].numel() for n in bucket])):
                sums[name] = part.view(like[name].shape)

    def total(self, sums: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sums over all ranks where each may lack some names."""
        own = {name: (tuple(t.shape), t.dtype, str(t.device.type)) for name, t in sums.items()}
        known = {name: kind for each in self.gather(own) for name, kind in each.items()}
        found = dict(sums)
        self.add(
            found,
            {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype, device) in known.items()},
        )
        return found


#: A process that trains by itself.
ONE = Ranks()


def _require_alike(stated: Sequence[Mapping[str, Any]]) -> None:
    for rank, other in enumerate(stated):
        for name, value in stated[0].items():
            if other.get(name) != value:
                raise ValueError(
                    f"{name} is not the same on rank 0 and rank {rank}. Start every process on the same data, "
                    "with the same arguments and seed."
                )


def pass_through(wrapper: torch.nn.parallel.DistributedDataParallel) -> None:
    """Let a wrapper of data parallelism exchange neither gradients, which are not clipped yet, nor buffers."""
    wrapper.require_backward_grad_sync = False
    wrapper.require_forward_param_sync = False
    # It would join all outputs in one function, whose backward pass sends zeros into those that no loss is made of.
    wrapper.find_unused_parameters = False


@contextmanager
def single_process() -> Iterator[None]:
    """A run that is made private meanwhile is this process's own, whatever its group does."""
    token = _SINGLE_PROCESS.set(True)
    try:
        yield
    finally:
        _SINGLE_PROCESS.reset(token)


@contextmanager
def peers_required(*, only_exchanges: bool = True) -> Iterator[None]:
    """What is exchanged meanwhile raises `RankLost` where another process cannot be reached.

    Where ranks do more meanwhile, a RuntimeError's words are looked at.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankLost) or not (only_exchanges or _of_an_exchange(error)):
            raise
        raise RankLost(
            "another process of the group ended or cannot be reached. This batch was not released. See its "
            "message, and start all again with resume=True."
        ) from error


def _of_an_exchange(error: RuntimeError) -> bool:
    words = "gloo", "nccl", "connection closed by peer"
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


def _portable(error: Exception) -> Exception:
    """The error as others can receive it: without what may not be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _buckets(like: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    bucket: list[str] = []
    held = 0
    for name, tensor in like.items():
        other = bucket and like[bucket[0]].device != tensor.device
        if bucket and (other or held + 4 * tensor.numel() > _BUCKET):
            yield bucket
            bucket, held = [], 0
        bucket.append(name)
        held += 4 * tensor.numel()
    if bucket:
        yield bucket
