"""The kernels that a piece of work will compile, found without a GPU, and compiled beforehand by all processors at once.

The work runs on tensors without data (`bench.simulate`); every launch is noted with what Triton specialises on. What a real
run then launches lies in Triton's cache.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from .meter import GPUS, simulated


@dataclass(frozen=True)
class Variant:
    """A kernel with arguments of the kinds it is compiled for."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def variants(work: Callable[[], Any], known: dict[Any, Variant]) -> list[Variant]:
    """What ``work``, given no device, launches on the meta device and is not ``known`` yet, in the order of first use."""
    begun = len(known)

    def launched(kernel: Any, *arguments: Any, grid: Any = None, warmup: bool = False, **options: Any) -> None:
        known.setdefault(_key(kernel, arguments, options), Variant(kernel, arguments, options))

    with simulated(GPUS["h100"]) as meter:
        meter.launched = launched  # type: ignore[method-assign, assignment]
        work()
    return list(known.values())[begun:]


#: Of a variant its name, the seconds it took, and what went wrong.
Compiled = tuple[str, float, str | None]


@contextlib.contextmanager
def compiling(processes: int, modules: Iterable[str] = ()) -> Iterator[Callable[[list[Variant]], Iterator[Compiled]]]:
    """A function that begins to compile variants into Triton's cache, and gives each as it is done.

    The processes come from one that has imported ``modules`` and never asked for the GPU, whose driver they could not share.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *modules])
    with contextlib.closing(context.Pool(processes)) as pool:
        yield lambda found: pool.imap_unordered(_compile, [_told(variant) for variant in found])


def _told(variant: Variant) -> tuple[str, str, list[Any], dict[str, Any]]:
    """A variant as another process can be told of it: of a tensor its dtype, and whether it lies on 16 bytes."""
    kernel = variant.kernel.fn
    arguments = [_Like(a.dtype, _on_16_bytes(a)) if isinstance(a, torch.Tensor) else a for a in variant.arguments]
    return kernel.__module__, kernel.__name__, arguments, variant.options


@dataclass(frozen=True)
class _Like:
    dtype: torch.dtype
    aligned: bool

    def tensor(self) -> torch.Tensor:
        return torch.empty(32, dtype=self.dtype, device="meta")[0 if self.aligned else 1 :]


def _compile(told: tuple[str, str, list[Any], dict[str, Any]]) -> tuple[str, float, str | None]:
    (module, name, arguments, options), start = told, time.perf_counter()
    try:
        kernel = getattr(importlib.import_module(module), name)
        kernel.warmup(*(a.tensor() if isinstance(a, _Like) else a for a in arguments), grid=(1,), **options)
    except Exception as error:
        return name, time.perf_counter() - start, f"{type(error).__name__}: {error}"[:300]
    return name, time.perf_counter() - start, None


def _on_16_bytes(tensor: torch.Tensor) -> bool:
    return tensor.storage_offset() * tensor.itemsize % 16 == 0


def _key(kernel: Any, arguments: Iterable[Any], options: dict[str, Any]) -> Any:
    given = dict(zip((p.name for p in kernel.params), arguments)) | options
    kinds = [_kind(given.pop(p.name, None), p) for p in kernel.params]
    return (kernel.fn.__module__, kernel.fn.__name__, *kinds, *sorted(given.items()))


def _kind(value: Any, parameter: Any) -> Any:
    """What Triton compiles a kernel anew for: values of constants, dtypes, addresses and numbers that 16 divides, and 1."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), _on_16_bytes(value) or parameter.do_not_specialize_on_alignment
    if parameter.is_constexpr or isinstance(value, tl.core.dtype):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__
    width = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return width if parameter.do_not_specialize else (width, value % 16 == 0, value == 1)
