"""What every launcher needs: the arguments it serves, the device a launch goes to, small tensors moved there, how many
programs fill it.
"""

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

from fastdp.ops.matrices import Matrices
from fastdp.ops.placed import CONSTANTS, copy_to_device

#: What a kernel that finds addresses in memory is told of the dtypes behind them.
TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

#: Numbers of a matrix from which on a copy of it is cheap beside its products.
MANY = 1 << 20

_Launcher = TypeVar("_Launcher", bound=Callable[..., Any])


def serves(factors: int) -> Callable[[_Launcher], _Launcher]:
    """Decorate what an op runs on a GPU: without autograd, and only if none of its first ``factors`` arguments is float64."""

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


def places_beside(numbers: Sequence[int], tensor: torch.Tensor) -> torch.Tensor:
    """Which of several tensors are meant, int64 on the device of ``tensor``: the same in every step, and sent once."""
    return CONSTANTS[tuple(numbers), torch.int64, tensor.device]


def table_beside(lines: Iterable[Iterable[int]], tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of lines, one behind the other, int64 on the device of ``tensor``: by numpy, in a third of torch's time."""
    return to_device_of(torch.from_numpy(np.array([*itertools.chain.from_iterable(lines)], np.int64)), tensor)


class Table:
    """A table of many matrices, made once for those of a form: what is new in each step are their addresses.

    Args:
        lines: int64, with 0 for each address.
        places: of each list of matrices where in the table, taken as one row, addresses go, and of which matrices.
    """

    def __init__(self, lines: Iterable[Iterable[int]], *places: tuple[Sequence[int], Sequence[int]]):
        self._lines = np.array([*itertools.chain.from_iterable(lines)], np.int64)
        self._places = [(np.array(at, np.intp), np.array(of, np.intp)) for at, of in places]

    def beside(self, tensor: torch.Tensor, *addresses: np.ndarray) -> torch.Tensor:
        """The table on the device of a tensor, with the addresses of the lists' matrices."""
        table = self._lines.copy()
        for (at, of), own in zip(self._places, addresses):
            table[at] = own[of]
        return to_device_of(torch.from_numpy(table), tensor)


class Launch(NamedTuple):
    """Matrices of the same dtypes and alignment, and the tiles that what is made of them is cut into."""

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


def readable(matrices: Sequence[torch.Tensor]) -> Matrices:
    """The matrices; a copy with columns of zeros behind of each whose many numbers cannot be read 16 bytes at a time.

    The gradient of 50,257 logits is one: reading it number by number takes nine times as long as all products.
    """
    matrices = Matrices.of(matrices)
    if max(matrices.form.columns, default=0) * (matrices.rows or 0) < MANY:
        return matrices
    padded = [
        torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % 8))
        if matrix.numel() >= MANY and step == 1 and not wide
        else matrix
        for matrix, (_, step), wide in zip(matrices, matrices.form.strides, matrices.wide)
    ]
    return matrices if all(map(operator.is_, padded, matrices)) else Matrices(padded)


def write_count(tensor: torch.Tensor) -> int:
    """How often a tensor was written to, where torch counts it: part of what results that are kept depend on."""
    return 0 if tensor.is_inference() else tensor._version


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether what is launched now is only recorded: a table is then not there before the record is replayed, for nobody else."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


_kept_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()


def kept_with(offsets: torch.Tensor, which: tuple[object, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What is made of a tensor of offsets alone: once, and kept as long as these are, unless it is only recorded."""
    known = _kept_tables.setdefault(offsets, {})
    key = (*which, write_count(offsets))
    found = known.get(key)
    if found is None:
        found = make()
        if not is_recorded(offsets):
            known[key] = found
    return found  # type: ignore[no-any-return]


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) for the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of a multiprocessor's own memory that one program may have: an H100's for the interpreter."""
    if device.type != "cuda":
        return 227 << 10
    # Torch says nothing of it on AMD's GPUs, whose programs have 64 KB.
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 64 << 10)


def stages_of(most: int, device: torch.device) -> int:
    """How many blocks of a loop are under way: ``most``, or two where programs have 64 KB of shared memory (T4, MI300)."""
    return most if shared_memory(device) > 64 << 10 else min(most, 2)


def registers_of(most: int) -> dict[str, int]:
    """The option that limits a kernel's registers; AMD's compiler has none."""
    return {} if torch.version.hip else {"maxnreg": most}


def largest_side(wide: bool, device: torch.device) -> int:
    """Side of the largest tiles whose products go on within the program: registers hold them, and Triton compiles."""
    if wide:
        return 64
    # Triton 3.7 ends with an error where it would put such products into the tensor memory of sm_100; smaller ones use none.
    return 32 if capability_of(device)[0] == 10 and triton.__version__.startswith("3.7.") else 128


def has_wide_tiles(device: torch.device) -> bool:
    """Whether matrix units read both factors from shared memory, and that holds three stages of 128 by 256 tiles."""
    # AMD's GPUs number their generations alike: an MI300 says 9.4.
    return not torch.version.hip and capability_of(device)[0] in (9, 10)


def splits_to_fill(tensor: torch.Tensor, programs: int, most: int) -> int:
    """In how many parts, at most ``most``, the work of each of ``programs`` programs is cut so that all processors have some.

    Depends on shapes and the device alone, so the order of a sum is the same in every run.
    """
    wanted = 4 * processors(tensor.device)
    return max(1, min(most, cdiv(wanted, max(1, programs))))


def row_tile(tokens: int, units: int, largest: int) -> int:
    """Length of the row tiles for units of about ``tokens / units`` tokens: a power of two from 16 to ``largest``."""
    return min(largest, max(16, next_power_of_2(cdiv(tokens, max(1, units)))))
