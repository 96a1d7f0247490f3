"""Nearest rows of an embedding table: ``snap``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fastdp._native as _native
from fastdp.ops.factors import in_full_precision
from fastdp.ops.stream import native_threads
from fastdp.ops.table import Op

#: The dtypes of rows; 16-bit rows are compared by the exact distances of the numbers they hold.
SNAP_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_table(table: Tensor, name: str = "table") -> None:
    """Raise TypeError or ValueError unless this is a table of rows [V, d], V between 1 and 2^31 - 1."""
    if table.dim() != 2:
        raise ValueError(f"{name} has {table.dim()} dimensions: it must be [rows, d]")
    if table.dtype not in SNAP_DTYPES:
        raise TypeError(f"{name} is {table.dtype}: rows must be float32, bfloat16 or float16")
    if not 0 < table.shape[0] < 1 << 31:
        raise ValueError(f"{name} has {table.shape[0]} rows: it must have between 1 and 2^31 - 1")


def _check_snap(x: Tensor, table: Tensor) -> None:
    check_table(table)
    if x.dim() != 2 or x.shape[1] != table.shape[1]:
        raise ValueError(f"x has shape {tuple(x.shape)}: it must be [N, {table.shape[1]}], as wide as the table's rows")
    if x.dtype not in SNAP_DTYPES:
        raise TypeError(f"x is {x.dtype}: rows must be float32, bfloat16 or float16")


def refuse_row(name: str, row: int) -> None:
    """Raise ValueError for a row that holds a NaN or an infinity."""
    raise ValueError(f"row {row} of {name} holds a NaN or an infinity: it has no nearest row, and is nobody's")


def refuse_non_finite(name: str, rows: Tensor) -> None:
    """Raise ValueError, naming the first row, if a row holds a NaN or an infinity."""
    bad = (~torch.isfinite(rows).all(1)).nonzero()
    if len(bad):
        refuse_row(name, int(bad[0]))


def _snap_reference(x: Tensor, table: Tensor) -> Tensor:
    refuse_non_finite("table", table)
    refuse_non_finite("x", x)
    # A sum over a strided row adds in an order that depends on the row's place: equal rows would differ.
    wide = table.double().contiguous()
    nearest = [(wide - row.double()).square().sum(1).argmin() for row in x]
    return torch.stack(nearest) if nearest else _snap_fake(x, table)


def _snap_fake(x: Tensor, table: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.int64)


SNAP = Op("snap(Tensor x, Tensor table) -> Tensor", reference=_snap_reference, fake=_snap_fake, check=_check_snap)
SNAP.in_family("snap")


def snap(x: Tensor, table: Tensor) -> Tensor:
    """Index of the table's row nearest to each row of ``x`` in Euclidean distance, ties to the lowest index.

    Exact: the answer is the row whose squared distance, computed in float64 from the very numbers given, is smallest.
    Rows as near as that, equal rows above all, count as ties. A first pass rules out every row that a proven bound on its
    error allows to. It runs in bfloat16, or in float32 where the processor has no bfloat16 products. What is left, a few rows
    for each of ``x``, is compared in float64. Needs O(N) memory beside tiles of a fixed size.

    Args:
        x: [N, d], float32, bfloat16 or float16, any strides.
        table: [V, d], likewise, V >= 1, on the same device. On a CPU a 16-bit table is widened to float32 as a whole.

    Returns:
        int64 [N].

    Raises:
        ValueError: another shape or device, an empty table, or a row of either that holds a NaN or an infinity.
        TypeError: another dtype.

    >>> snap(torch.tensor([[0.9], [-3.0]]), torch.tensor([[0.0], [1.0]]))
    tensor([1, 0])
    """
    return SNAP(x, table)


# On processors: tiles of torch's matrix products, between the passes of csrc/snap.cpp.

#: Rows searched at once; rows of the table multiplied at once, and entries of those. A tile ends in a barrier, at which
#: threads wait for one that shares its core with others; with 4,096 rows that is rare, and scratch stays below 32 MB
#: (64 MB in float32).
BLOCK_ROWS = 2048
TABLE_ROWS = 4096
_TILE_ENTRIES = 1 << 22


def survey(name: str, rows: Tensor) -> int:
    """As ``refuse_non_finite``, for contiguous float32 rows on the CPU; returns the bits of the largest magnitude."""
    bad, bits = _native.survey(rows, rows.shape[0], rows.shape[1], native_threads())
    if bad >= 0:
        refuse_row(name, bad)
    return bits


def centre_of(table: Tensor) -> Tensor:
    """About the mean row. Distances do not depend on it, but rows of a trained table are much shorter around it."""
    return table[:: -(-table.shape[0] // 1024)].mean(0, dtype=torch.float64).float()


def multiplies_in_bf16() -> bool:
    # Where the user lets torch round the factors of a float32 product, only bfloat16 ones have an error that is known.
    backend = getattr(torch.backends.mkldnn, "matmul", None)
    rounds = getattr(backend, "fp32_precision", "none") not in ("none", "ieee")
    return _native.has_bf16_products() or rounds or torch.get_float32_matmul_precision() != "highest"


@in_full_precision
def search(rows: Callable[[int, int], Tensor], n: int, table: Tensor, table_bits: int) -> Tensor:
    """The nearest row of ``table`` (contiguous float32) to each of ``n`` rows, which ``rows(begin, end)`` makes.

    The products are torch's own (``torch.mm``), tile by tile; the passes before and after them are ``csrc/snap.cpp``.
    """
    size, d = table.shape
    result = torch.zeros(n, dtype=torch.int64)
    if n == 0 or d == 0:
        return result
    half = multiplies_in_bf16()
    dtype = torch.bfloat16 if half else torch.float32
    centre = centre_of(table)
    finder = _native.Snap(table, size, d, centre, table_bits, half, native_threads())
    most, width = min(n, BLOCK_ROWS), min(size, TABLE_ROWS, max(256, _TILE_ENTRIES // d))
    rounded, tile = torch.empty(most, d, dtype=dtype), torch.empty(width, d, dtype=dtype)
    products = torch.empty(most * width + 16, dtype=dtype)
    for begin in range(0, n, BLOCK_ROWS):
        x = rows(begin, min(n, begin + BLOCK_ROWS))
        finder.begin(x, len(x), rounded)
        for first in range(0, size, width):
            count = min(width, size - first)
            finder.tile(first, count, tile)
            out = products[: len(x) * count].view(len(x), count)
            torch.mm(rounded[: len(x)], tile[:count].t(), out=out)
            finder.scan(first, count, out)
        finder.finish(result[begin:])
    return result


@SNAP.on_cpu
def _snap_on_cpu(x: Tensor, table: Tensor) -> Tensor:
    table = table.detach().float().contiguous()
    bits = survey("table", table)
    x = x.detach().float().contiguous()
    survey("x", x)
    return search(lambda begin, end: x[begin:end], len(x), table, bits)
