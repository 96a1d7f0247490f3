"""Helpers of all launchers: which arguments a kernel serves, tensors for the device, and how many programs fill it."""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakIdKeyDictionary

from fastdp.ops.matrices import Matrices, MatrixForm
from fastdp.ops.placed import CONSTANTS, copy_to_device

#: Triton's names of torch's dtypes, for kernels that get addresses instead of tensors.
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

#: Elements from which a matrix costs little to copy, compared with its products.
LARGE_MATRIX = 1 << 20

_Launcher = TypeVar("_Launcher", bound=Callable[..., Any])


def serves(factors: int) -> Callable[[_Launcher], _Launcher]:
    """Decorate a launcher: run it without autograd, and leave the op to torch if one of its ``factors`` factors is float64."""

    def is_double(argument: Any) -> bool:
        if isinstance(argument, Matrices):
            return torch.float64 in argument.form.dtypes
        if isinstance(argument, list):
            return torch.float64 in [x.dtype for x in argument]
        return argument.dtype is torch.float64

    def decorate(launcher: _Launcher) -> _Launcher:
        @functools.wraps(launcher)
        def run(*args: Any) -> Any:
            with torch.no_grad():
                return NotImplemented if any(map(is_double, args[:factors])) else launcher(*args)

        return run  # type: ignore[return-value]

    return decorate


def assert_ids(ids: torch.Tensor, rows: int) -> None:
    """Stop the device if an id is outside a table: it must not become an address, and the host must not wait."""
    torch._assert_async(((ids >= 0) & (ids < rows)).all(), "an id is outside the table")


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensor's. Nothing to do for the interpreter's CPU tensors."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def to_device_of(small: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``small`` on the device of ``tensor``; the copy is queued, the host does not wait for the device."""
    return copy_to_device(small, tensor.device)


def indices_on_device(numbers: Sequence[int], tensor: torch.Tensor) -> torch.Tensor:
    """Indices that are the same in every step: int64 on the device of ``tensor``, copied there once."""
    return CONSTANTS[tuple(numbers), torch.int64, tensor.device]


def table_on_device(lines: Iterable[Iterable[int]], tensor: torch.Tensor) -> torch.Tensor:
    """All lines' integers in one int64 vector on the device of ``tensor``. Numpy builds it in a third of torch's time."""
    return to_device_of(torch.from_numpy(np.array([*itertools.chain.from_iterable(lines)], np.int64)), tensor)


class Table:
    """A launch's table of matrices, made once for all lists of one form. Only the matrices' addresses are new in each step.

    Args:
        lines: the table's integers, with 0 in place of each address.
        places: for each list of matrices, positions in the flattened table, and the index of the matrix whose address goes there.
    """

    def __init__(self, lines: Iterable[Iterable[int]], *places: tuple[Sequence[int], Sequence[int]]):
        self._lines = np.array([*itertools.chain.from_iterable(lines)], np.int64)
        self._places = [(np.array(at, np.intp), np.array(of, np.intp)) for at, of in places]

    def on_device_of(self, tensor: torch.Tensor, *addresses: np.ndarray) -> torch.Tensor:
        """The table on the device of ``tensor``, filled with each list's addresses (`Matrices.addresses`)."""
        table = self._lines.copy()
        for (at, of), own in zip(self._places, addresses):
            table[at] = own[of]
        return to_device_of(torch.from_numpy(table), tensor)


class Launch(NamedTuple):
    """One launch: the pairs of matrices that share dtypes and alignment, and the tiles of their results.

    Attributes:
        members: indices of the pairs among all pairs of the op.
        b_m: rows of a tile.
        b_n: columns of a tile.
        tiles: number of tiles of all members.
    """

    of_left: torch.dtype
    of_right: torch.dtype
    contiguous: bool
    wide_loads: bool
    members: list[int]
    b_m: int
    b_n: int
    tiles: int
    table: Table


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up: Triton's own is callable from kernels too, and takes the host 80 times as long."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``, a positive number."""
    return 1 << (n - 1).bit_length()


def with_wide_rows(matrices: Sequence[torch.Tensor]) -> Matrices:
    """The matrices, where each large one whose rows cannot be read 16 bytes at a time is copied and padded with zero columns.

    The gradient of 50,257 logits is such a matrix: reading single elements takes nine times as long as all products.
    """
    matrices = Matrices.of(matrices)
    if max(matrices.form.columns, default=0) * (matrices.rows or 0) < LARGE_MATRIX:
        return matrices
    padded = [
        torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % 8))
        if matrix.numel() >= LARGE_MATRIX and step == 1 and not wide
        else matrix
        for matrix, (_, step), wide in zip(matrices, matrices.form.strides, matrices.wide)
    ]
    return matrices if all(map(operator.is_, padded, matrices)) else Matrices(padded)


def write_count(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place, where torch counts it. Part of the key of cached results."""
    return 0 if tensor.is_inference() else tensor._version


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is recording. Kernels then run at replay only, so that nothing they write may be cached for others."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


_kept_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()


def cached_with(offsets: torch.Tensor, which: tuple[object, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return ``make()``, cached while ``offsets`` lives unchanged, or uncached while a CUDA graph records.

    ``which`` names the result among those made of the same offsets.
    """
    known = _kept_tables.setdefault(offsets, {})
    key = (*which, write_count(offsets))
    found = known.get(key)
    if found is None:
        found = make()
        if not is_recorded(offsets):
            known[key] = found
    return found  # type: ignore[no-any-return]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) for the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use; an H100's for the interpreter."""
    if device.type != "cuda":
        return 227 << 10
    # Torch says nothing of it on AMD's GPUs, whose programs have 64 KB.
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 64 << 10)


def stages_of(most: int, device: torch.device) -> int:
    """Pipeline stages of a loop: at most ``most``, and two where programs have 64 KB of shared memory (T4, MI300)."""
    return most if shared_memory(device) > 64 << 10 else min(most, 2)


def registers_of(most: int) -> dict[str, int]:
    """The option that limits a kernel's registers; AMD's compiler has none."""
    return {} if torch.version.hip else {"maxnreg": most}


def gram_side(wide: bool, device: torch.device) -> int:
    """Side of the largest tiles of two Gram matrices: registers hold both, and on Blackwell another copy."""
    return 64 if wide or capability_of(device)[0] == 10 else 128


def has_wide_tiles(device: torch.device) -> bool:
    """Whether matrix units read both factors from shared memory, which holds three stages of 128 by 256 tiles."""
    # AMD's GPUs number their generations alike: an MI300 says 9.4.
    return not torch.version.hip and capability_of(device)[0] in (9, 10)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def enable_descriptors(launch: Any, forms: Iterable[MatrixForm], device: torch.device) -> bool:
    """Give Triton memory for tensor descriptors if the copy engine of Hopper and later can read a launch's factors.

    These have 16 bits, and rows that begin every 16 bytes and share no memory, which the engine does not promise to read.
    """
    whole = launch.contiguous and launch.wide_loads and torch.float32 not in (launch.of_left, launch.of_right)
    found = whole and not any(form.rows_overlap for form in forms) and has_wide_tiles(device)
    if found:
        # Of this thread alone: backward passes run in others.
        triton.set_allocator(_scratch)
    return found


def splits_to_fill(tensor: torch.Tensor, programs: int, most: int) -> int:
    """Into how many parts (at most ``most``) to cut each of ``programs`` programs so that all multiprocessors have work.

    Depends on shapes and the device alone, so the order of a sum is the same in every run.
    """
    wanted = 4 * multiprocessors(tensor.device)
    return max(1, min(most, cdiv(wanted, max(1, programs))))


def row_tile(tokens: int, units: int, largest: int) -> int:
    """Length of the row tiles for units of about ``tokens / units`` tokens: a power of two from 16 to ``largest``."""
    return min(largest, max(16, next_power_of_2(cdiv(tokens, max(1, units)))))
