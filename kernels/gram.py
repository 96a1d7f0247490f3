"""Squared norms by Gram matrices: ``sum over t, s of <L_t, L_s> <R_t, R_s>`` for each unit, without any gradient.

Both Gram matrices are symmetric, so a job is a pair of tiles of a unit's tokens on or below the diagonal; those below
count twice. Jobs of all units and of all matrices over the same tokens are dealt to as many programs as the device runs at
a time, the widest matrices first: no processor waits for more than one job of another. Tiles of both Gram matrices live in
registers, that of a shared right factor is made once for all its lefts. The diagonals of tiles on the diagonal are the
squared lengths of rows, and so the scale of rounding errors (`fastdp.ops.row_products`) comes for nothing.

On Hopper and later the copy engine reads 16-bit factors by tensor descriptors (``DESCRIBED``). It reads past the end of a unit,
which is masked in the finished tile.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastdp.ops.matrices import MatrixForm

from .launch import (
    TRITON_DTYPES,
    Table,
    cached_with,
    enable_descriptors,
    gram_side,
    indices_on_device,
    multiprocessors,
    on_device_of,
    row_tile,
    stages_of,
    to_device_of,
    with_wide_rows,
)
from .tiles import described_gram_tile, gram_tile

_RIGHT_FIELDS = tl.constexpr(6)
_LEFT_FIELDS = tl.constexpr(4)
PADDING = tl.constexpr(2.0**-42)  # as csrc/bounds.h and fastdp/ops/bounds.py have it
#: Programs that a processor runs at a time, and how fast each of their entries is made, by side of tiles: assumed, as larger
#: tiles read each row fewer times.
RESIDENT = {128: 1, 64: 2, 32: 4, 16: 8}
_SPEED = {128: 1.0, 64: 0.55, 32: 0.3, 16: 0.15}


@triton.jit(do_not_specialize=["units", "most", "b_t"])
def pairs_kernel(p_offsets, p_table, units, most, b_t):
    # [units + 1] pairs before each unit, and of each pair the first tokens of both its tiles and the end of its unit
    unit = tl.program_id(0)
    before = 0
    for first in range(0, unit, 1024):
        o_b = first + tl.arange(0, 1024)
        m_b = o_b < unit
        # [1024]
        tiles = tl.load(p_offsets + o_b + 1, mask=m_b, other=0) - tl.load(p_offsets + o_b, mask=m_b, other=0)
        tiles = (tiles.to(tl.int32) + b_t - 1) // b_t
        before += tl.sum(tiles * (tiles + 1) // 2, 0)
    start = tl.load(p_offsets + unit).to(tl.int32)
    end = tl.load(p_offsets + unit + 1).to(tl.int32)
    tiles = (end - start + b_t - 1) // b_t
    pairs = tiles * (tiles + 1) // 2
    tl.store(p_table + unit, before)
    tl.store(p_table + unit + 1, before + pairs)
    p_pairs = p_table + units + 1 + before
    for first in range(0, pairs, 128):
        o_p = first + tl.arange(0, 128)
        m_p = o_p < pairs
        row = ((tl.sqrt(8.0 * o_p.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
        # The root may be off by one: row (row + 1) / 2 <= pair < (row + 1) (row + 2) / 2.
        row += (((row + 1) * (row + 2)) // 2 <= o_p).to(tl.int32)
        row -= ((row * (row + 1)) // 2 > o_p).to(tl.int32)
        column = o_p - (row * (row + 1)) // 2
        # [128]
        tl.store(p_pairs + o_p, start + row * b_t, mask=m_p)
        tl.store(p_pairs + most + o_p, start + column * b_t, mask=m_p)
        tl.store(p_pairs + 2 * most + o_p, end + 0 * o_p, mask=m_p)


@triton.jit
def _lengths(squares, width):
    # Upper bounds of the lengths of rows: squares add up in a chain at most width + 11 roundings long (docs/clipping.md).
    own = 1.0 + (width + 32).to(tl.float32) * 1.25e-7
    return tl.sqrt(tl.maximum(squares, 0.0) * own + width.to(tl.float32) * (PADDING * PADDING))


@triton.jit
def _tile(
    p_x, first, first_col, end, tokens, width, stride_t, stride_k,
    DESCRIBED: tl.constexpr, b_t: tl.constexpr, b_k: tl.constexpr,
):  # fmt: skip
    # [b_t, b_t]: the inner products of two tiles of rows of x [tokens, width]
    if DESCRIBED:
        rows = tl.make_tensor_descriptor(p_x, [tokens, width], [stride_t, 1], [b_t, b_k])
        tile = described_gram_tile(rows, first, first_col, width, b_t, b_k)
    else:
        o_row = (first + tl.arange(0, b_t)).to(tl.int64)
        o_col = (first_col + tl.arange(0, b_t)).to(tl.int64)
        tile = gram_tile(p_x, o_row, o_row < end, stride_t, stride_k, p_x, o_col, o_col < end, stride_t, stride_k,
                         width, b_t, b_t, b_k)  # fmt: skip
    return tile


@triton.jit(do_not_specialize=["units", "most", "problems", "tokens"], do_not_specialize_on_alignment=["p_products"])
def _gram_kernel(
    p_rights, p_lefts, p_table, p_squares, p_products, units, most, problems, tokens,
    RIGHT: tl.constexpr, LEFT: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr, DESCRIBED: tl.constexpr,
    b_t: tl.constexpr, b_k: tl.constexpr,
):  # fmt: skip
    pairs = tl.load(p_table + units)
    p_pairs = p_table + units + 1
    for job in tl.range(tl.program_id(0), problems * pairs, tl.num_programs(0), disable_licm=True):
        problem = job // pairs
        pair = job - problem * pairs
        first = tl.load(p_pairs + pair)
        first_col = tl.load(p_pairs + most + pair)
        end = tl.load(p_pairs + 2 * most + pair)
        o_row = (first + tl.arange(0, b_t)).to(tl.int64)
        o_col = (first_col + tl.arange(0, b_t)).to(tl.int64)
        p_right = p_rights + problem * _RIGHT_FIELDS
        right_at = tl.load(p_right).to(tl.pointer_type(RIGHT))
        width = tl.load(p_right + 1).to(tl.int32)
        stride_t = tl.load(p_right + 2)
        stride_k = tl.load(p_right + 3)
        # What the launcher knows of all problems, said so that Triton believes it: wide loads depend on it.
        if CONTIGUOUS:
            stride_k = 1
        if ALIGNED:
            right_at = tl.multiple_of(right_at, 16)
            stride_t = stride_t // 8 * 8
            width = width // 8 * 8
        right = _tile(right_at, first, first_col, end, tokens, width, stride_t, stride_k, DESCRIBED, b_t, b_k)
        # Tiles below the diagonal count twice.
        times = tl.where(first == first_col, 1.0, 2.0)
        use = tl.load(p_right + 4).to(tl.int32)
        last = use + tl.load(p_right + 5).to(tl.int32)
        for i in tl.range(use, last, disable_licm=True):
            p_left = p_lefts + i * _LEFT_FIELDS
            left_at = tl.load(p_left).to(tl.pointer_type(LEFT))
            m = tl.load(p_left + 1).to(tl.int32)
            stride_lt = tl.load(p_left + 2)
            stride_lk = tl.load(p_left + 3)
            if CONTIGUOUS:
                stride_lk = 1
            if ALIGNED:
                left_at = tl.multiple_of(left_at, 16)
                stride_lt = stride_lt // 8 * 8
                m = m // 8 * 8
            left = _tile(left_at, first, first_col, end, tokens, m, stride_lt, stride_lk, DESCRIBED, b_t, b_k)
            o_part = (tl.zeros((), tl.int64) + i) * most + pair
            tile = right * left
            if DESCRIBED:
                tile = tl.where((o_row < end)[:, None] & (o_col < end)[None, :], tile, 0.0)
            tl.store(p_squares + o_part, times * tl.sum(tile))
            product = 0.0
            if first == first_col:
                # [b_t, b_t], of which the diagonal counts
                sizes = _lengths(right, width) * _lengths(left, m)
                product = tl.sum(tl.where((o_row < end)[:, None] & (o_row[:, None] == o_col[None, :]), sizes, 0.0))
            tl.store(p_products + o_part, product)


@triton.jit(do_not_specialize=["units", "most"], do_not_specialize_on_alignment=["p_products"])
def sum_pairs_kernel(p_parts, p_products, p_table, p_out, p_sizes, units, most, b: tl.constexpr):
    unit = tl.program_id(0)
    use = tl.program_id(1).to(tl.int64)
    first = tl.load(p_table + unit)
    last = tl.load(p_table + unit + 1)
    total = tl.zeros((b,), tl.float64)
    size = tl.zeros((b,), tl.float64)
    for i in range(first, last, b):
        o_part = i + tl.arange(0, b)
        # [b]
        total += tl.load(p_parts + use * most + o_part, mask=o_part < last, other=0.0).to(tl.float64)
        size += tl.load(p_products + use * most + o_part, mask=o_part < last, other=0.0).to(tl.float64)
    # A norm far below its terms may come out below zero by their rounding; a NaN stays one.
    norm = tl.sum(total, 0).to(tl.float32)
    tl.store(p_out + use * units + unit, tl.where(norm < 0.0, 0.0, norm))
    tl.store(p_sizes + use * units + unit, tl.sum(size, 0))


def pairs_of(offsets: torch.Tensor, tokens: int, b_t: int) -> tuple[torch.Tensor, int]:
    """The table of `pairs_kernel`, made once for each tensor of offsets, and how many pairs it may hold at most."""
    units, tiles = offsets.shape[0] - 1, tokens // b_t + 1
    most = tiles * (tiles + 1) // 2 + units

    def make() -> torch.Tensor:
        table = torch.empty(units + 1 + 3 * most, dtype=torch.int32, device=offsets.device)
        with on_device_of(offsets):
            pairs_kernel[(units,)](offsets, table, units, most, b_t=b_t, num_warps=4)
        return table

    return cached_with(offsets, ("pairs", b_t, tokens), make), most


def jobs_of(length: int, units: int, problems: int, b_t: int) -> int:
    """Jobs of a launch whose units have ``length`` tokens each."""
    tiles = -(-length // b_t)
    return problems * units * (tiles * (tiles + 1) // 2)


def tile_of(tokens: int, units: int, problems: int, largest: int, count: int) -> int:
    """Side of the tiles on ``count`` processors, for units of about ``tokens / units`` tokens: the largest unless they idle."""
    length = max(1, -(-tokens // units))
    sides = [side for side in (128, 64, 32, 16) if side <= row_tile(tokens, units, largest)]
    return min(sides, key=lambda b: -(-jobs_of(length, units, problems, b) // count) * b * b / _SPEED[b])


class _Launch(NamedTuple):
    """Uses whose factors are of the same dtypes and alignment: the lefts of each right, the widest first."""

    of_right: torch.dtype
    of_left: torch.dtype
    contiguous: bool
    wide_loads: bool
    problems: int
    order: tuple[int, ...]
    table: Table


@functools.lru_cache(maxsize=128)
def _launches(
    lefts: MatrixForm, rights: MatrixForm, counts: tuple[int, ...], wide_lefts: bytes, wide_rights: bytes
) -> list[_Launch]:
    kinds: dict[tuple[torch.dtype, torch.dtype, bool, bool], dict[int, list[int]]] = {}
    uses = iter(range(len(lefts.columns)))
    for right, count in enumerate(counts):
        for left in itertools.islice(uses, count):
            contiguous = lefts.strides[left][1] == rights.strides[right][1] == 1
            wide_loads = bool(wide_lefts[left] and wide_rights[right])
            kind = rights.dtypes[right], lefts.dtypes[left], contiguous, wide_loads
            kinds.setdefault(kind, {}).setdefault(right, []).append(left)
    found = []
    for kind, own in kinds.items():
        problems = sorted(own.items(), key=lambda p: -sum([lefts.columns[i] for i in p[1]]) - rights.columns[p[0]])
        order = tuple(i for _, members in problems for i in members)
        firsts = [0, *itertools.accumulate([len(members) for _, members in problems])]
        lines = [
            (0, rights.columns[right], *rights.strides[right], first, len(members))
            for (right, members), first in zip(problems, firsts)
        ]
        lines_of_lefts = [(0, lefts.columns[i], *lefts.strides[i]) for i in order]
        behind, numbers = len(problems) * _RIGHT_FIELDS.value, [right for right, _ in problems]
        table = Table(
            (*lines, *lines_of_lefts),
            (range(0, behind, _RIGHT_FIELDS.value), numbers),
            (range(behind, behind + len(order) * _LEFT_FIELDS.value, _LEFT_FIELDS.value), order),
        )
        found.append(_Launch(*kind, len(problems), order, table))
    return found


def gram_norms(
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    counts: Sequence[int],
    offsets: torch.Tensor,
    b_t: int | None = None,
    programs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared norms [k, B], float32, and row products [k, B], float64, of k uses.

    Lefts [N, m_i], of which each of the rights [N, n_j] has ``counts[j]``: float32, bfloat16 or float16, any strides; offsets
    int64 [B + 1]. One launch for all factors of the same dtypes and alignment.
    """
    units, (tokens, device), uses = offsets.shape[0] - 1, (rights[0].shape[0], rights[0].device), len(lefts)
    squares = torch.zeros(uses, units, dtype=torch.float32, device=device)
    products = torch.zeros(uses, units, dtype=torch.float64, device=device)
    if units == 0 or tokens == 0:
        return squares, products
    offsets, lefts, rights = to_device_of(offsets, squares), with_wide_rows(lefts), with_wide_rows(rights)
    for launch in _launches(lefts.form, rights.form, tuple(counts), lefts.wide, rights.wide):
        wide = torch.float32 in (launch.of_right, launch.of_left)
        count = multiprocessors(device)
        side = b_t or tile_of(tokens, units, launch.problems, gram_side(wide, device), count)
        pairs, most = pairs_of(offsets, tokens, side)
        table, order = launch.table.on_device_of(squares, rights.addresses, lefts.addresses), launch.order
        parts = torch.empty(2, len(order), most, dtype=torch.float32, device=device)
        all_of_it = order == tuple(range(uses))
        out = squares if all_of_it else torch.empty(len(order), units, dtype=torch.float32, device=device)
        sizes = products if all_of_it else torch.empty(len(order), units, dtype=torch.float64, device=device)
        described = enable_descriptors(launch, (lefts.form, rights.form), device)
        with on_device_of(squares):
            _gram_kernel[(programs or min(most * launch.problems, RESIDENT[side] * count),)](
                table, table[launch.problems * _RIGHT_FIELDS.value :], pairs, parts[0], parts[1],
                units, most, launch.problems, tokens,
                RIGHT=TRITON_DTYPES[launch.of_right], LEFT=TRITON_DTYPES[launch.of_left],
                CONTIGUOUS=launch.contiguous, ALIGNED=launch.wide_loads, DESCRIBED=described,
                b_t=side, b_k=32 if wide else 128 if described and side == 128 else 64,
                enable_fp_fusion=True, num_warps=8 if wide or side == 128 else 4,
                num_stages=stages_of(3 if described and side == 128 else 4, device),
            )  # fmt: skip
            sum_pairs_kernel[(units, len(order))](
                parts[0], parts[1], pairs, out, sizes, units, most, b=128, num_warps=4
            )
        if not all_of_it:
            into = indices_on_device(order, squares)
            squares[into], products[into] = out, sizes
    return squares, products
