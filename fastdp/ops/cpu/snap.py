"""``snap`` on processors: tiles of torch's matrix products, between the passes of csrc/snap.cpp."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fastdp._native as _native
from fastdp.ops.factors import in_full_precision
from fastdp.ops.snap import refuse_row
from fastdp.ops.stream import native_threads

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


def snap(x: Tensor, table: Tensor) -> Tensor:
    """:func:`fastdp.ops.snap` on a processor."""
    table = table.detach().float().contiguous()
    bits = survey("table", table)
    x = x.detach().float().contiguous()
    survey("x", x)
    return search(lambda begin, end: x[begin:end], len(x), table, bits)
