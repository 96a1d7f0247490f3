"""Norms by tiles of each unit's gradient: squared, absolute, and squared under a mask and outside it.

A program makes one tile of one unit's gradient in registers, over all tokens of the unit, and keeps only its sum.
Flop: 2 T m n a unit; the factors are read once for each row or column of tiles, mostly from the second-level cache.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fastdp.ops.matrices import MatrixForm

from .launch import (
    TRITON_DTYPES,
    Launch,
    Table,
    cdiv,
    has_wide_tiles,
    indices_on_device,
    next_power_of_2,
    on_device_of,
    splits_to_fill,
    stages_of,
    to_device_of,
    with_wide_rows,
)
from .reduce import sum_slots
from .tiles import listed_factors, outer_tile

SQUARE = tl.constexpr(0)
ABSOLUTE = tl.constexpr(1)
MASKED_SQUARE = tl.constexpr(2)
#: Of a line of the table of many matrices: see `listed_factors`.
FIELDS = tl.constexpr(8)


@triton.jit(do_not_specialize=["units", "tiles_n", "tiles"])
def _direct_kernel(
    p_left, p_right, p_offsets, p_mask, p_parts, units, tiles_n, tiles, m, n,
    stride_lt, stride_lm, stride_rt, stride_rn, stride_mm, stride_mn,
    b_m: tl.constexpr, b_n: tl.constexpr, b_t: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    # All tiles of a unit run close together in time: its factors stay in the second-level cache.
    pid = tl.program_id(0).to(tl.int64)
    unit = pid // tiles
    tile = (pid % tiles).to(tl.int32)
    o_m = (tile // tiles_n) * b_m + tl.arange(0, b_m)
    o_n = (tile % tiles_n) * b_n + tl.arange(0, b_n)
    m_m = o_m < m
    m_n = o_n < n
    start = tl.load(p_offsets + unit)
    end = tl.load(p_offsets + unit + 1)
    gradient = outer_tile(p_left, p_right, start, end, o_m, o_n, m_m, m_n, stride_lt, stride_lm, stride_rt, stride_rn,
                          b_m, b_n, b_t)  # fmt: skip
    if KIND == ABSOLUTE:
        tl.store(p_parts + pid, tl.sum(tl.abs(gradient)))
    else:
        square = gradient * gradient
        if KIND == MASKED_SQUARE:
            p_inside = p_mask + o_m[:, None].to(tl.int64) * stride_mm + o_n[None, :].to(tl.int64) * stride_mn
            # [b_m, b_n]
            inside = tl.load(p_inside, mask=m_m[:, None] & m_n[None, :], other=0) != 0
            tl.store(p_parts + pid, tl.sum(tl.where(inside, square, 0.0)))
            square = tl.where(inside, 0.0, square)
            tl.store(p_parts + units.to(tl.int64) * tiles + pid, tl.sum(square))
        else:
            tl.store(p_parts + pid, tl.sum(square))


@triton.jit(do_not_specialize=["units", "splits"])
def chosen_kernel(
    p_lines, p_offsets, p_chosen, p_parts, units, splits,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr,
    b_m: tl.constexpr, b_n: tl.constexpr, b_t: tl.constexpr,
):  # fmt: skip
    # Every part of a unit's tiles, of one of many matrices; hardly any unit is chosen.
    pid = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    p_line = p_lines + pid // units * FIELDS
    unit = pid % units
    p_left, p_right, m, n, stride_lt, stride_lm, stride_rt, stride_rn = listed_factors(
        p_line, LEFT, RIGHT, CONTIGUOUS, ALIGNED
    )
    tiles_n = tl.cdiv(n, b_n)
    tiles = tl.where(tl.load(p_chosen + pid) != 0, tl.cdiv(m, b_m) * tiles_n, 0)
    start = tl.load(p_offsets + unit)
    end = tl.load(p_offsets + unit + 1)
    total = 0.0
    for tile in range(split, tiles, splits):
        o_m = (tile // tiles_n) * b_m + tl.arange(0, b_m)
        o_n = (tile % tiles_n) * b_n + tl.arange(0, b_n)
        gradient = outer_tile(p_left, p_right, start, end, o_m, o_n, o_m < m, o_n < n, stride_lt, stride_lm, stride_rt,
                              stride_rn, b_m, b_n, b_t)  # fmt: skip
        total += tl.sum(gradient * gradient)
    tl.store(p_parts + pid * splits + split, total)


def side_tile(width: int, wide: bool) -> int:
    """Side of the tiles of a gradient that is ``width`` wide: 128 (64 for float32 factors), or less for narrow ones."""
    return min(64 if wide else 128, max(16, next_power_of_2(width)))


def direct_norms(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, measure: int, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Norms [1, B], float32, of left [N, m] and right [N, n]; float32, bfloat16 or float16, any strides.

    With ``mask`` (bool [m, n]), [2, B]: of the entries where it is True, then where it is False.
    """
    units, m, n = offsets.shape[0] - 1, left.shape[1], right.shape[1]
    rows = 1 if mask is None else 2
    if units == 0 or m == 0 or n == 0:
        return torch.zeros(rows, units, dtype=torch.float32, device=right.device)
    offsets = to_device_of(offsets, right)
    if mask is None:
        left, right = with_wide_rows([left, right])
        m, n = left.shape[1], right.shape[1]
    wide = torch.float32 in (left.dtype, right.dtype)
    b_m, b_n = side_tile(m, wide), side_tile(n, wide)
    if not wide and mask is None and b_m == 128 and n >= 256 and has_wide_tiles(right.device):
        b_n = 256  # reads a quarter fewer bytes for each product, which is what these tiles wait for
    tiles_n = cdiv(n, b_n)
    tiles = cdiv(m, b_m) * tiles_n
    parts = torch.empty(rows, units * tiles, dtype=torch.float32, device=right.device)
    with on_device_of(right):
        _direct_kernel[(units * tiles,)](
            left, right, offsets, parts if mask is None else mask.view(torch.uint8), parts,
            units, tiles_n, tiles, m, n,
            *left.stride(), *right.stride(), *((0, 0) if mask is None else mask.stride()),
            b_m=b_m, b_n=b_n, b_t=32 if wide else 64, KIND=measure,
            enable_fp_fusion=True, num_warps=8 if b_m * b_n > 4096 else 4, num_stages=stages_of(3, right.device),
        )  # fmt: skip
    return sum_slots(parts, units, tiles)


@functools.lru_cache(maxsize=128)
def tables_of(
    lefts: MatrixForm, rights: MatrixForm, wide_lefts: bytes, wide_rights: bytes, sides: tuple[int, int]
) -> list[Launch]:
    """Pairs by the launches that serve them; ``sides`` of tiles at most: of factors of 16 bits, and of 32."""
    kinds: dict[tuple[torch.dtype, torch.dtype, bool, bool], list[int]] = {}
    for i, width in enumerate(zip(lefts.columns, rights.columns)):
        if all(width):
            contiguous = lefts.strides[i][1] == rights.strides[i][1] == 1
            kind = lefts.dtypes[i], rights.dtypes[i], contiguous, bool(wide_lefts[i] and wide_rights[i])
            kinds.setdefault(kind, []).append(i)
    found = []
    for kind, members in kinds.items():
        wide = torch.float32 in kind
        largest = sides[wide]
        widths = [(lefts.columns[i], rights.columns[i]) for i in members]
        b_m, b_n = (min(largest, side_tile(max(widest), wide)) for widest in zip(*widths))
        tiles = max(-(-m // b_m) * -(-n // b_n) for m, n in widths)
        lines = [(0, 0, *width, *lefts.strides[i], *rights.strides[i]) for i, width in zip(members, widths)]
        every, fields = len(members) * FIELDS.value, FIELDS.value
        table = Table(lines, (range(0, every, fields), members), (range(1, every, fields), members))
        found.append(Launch(*kind, members, b_m, b_n, tiles, table))
    return found


def chosen_norms(
    lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor], offsets: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Squared norms [k, B], float32, of lefts [N, m_i] and rights [N, n_i] where ``chosen`` (bool [k, B]) says, 0 elsewhere.

    Float32, bfloat16 or float16, any strides; one launch for all of the same dtypes and alignment.
    """
    units, device = chosen.shape[1], chosen.device
    norms = torch.zeros(chosen.shape, dtype=torch.float32, device=device)
    if rights[0].shape[0] == 0:
        return norms
    lefts, rights, offsets = with_wide_rows(lefts), with_wide_rows(rights), to_device_of(offsets, norms)
    for launch in tables_of(lefts.form, rights.form, lefts.wide, rights.wide, (128, 64)):
        wide, members = torch.float32 in (launch.of_left, launch.of_right), launch.members
        splits = splits_to_fill(norms, len(members) * units, launch.tiles)
        every = len(members) == len(lefts)
        into = members if every else indices_on_device(members, norms)
        parts = torch.empty(1, len(members) * units * splits, dtype=torch.float32, device=device)
        with on_device_of(norms):
            chosen_kernel[(len(members) * units, splits)](
                launch.table.on_device_of(norms, lefts.addresses, rights.addresses), offsets,
                (chosen if every else chosen[into]).contiguous().view(torch.uint8), parts, units, splits,
                LEFT=TRITON_DTYPES[launch.of_left], RIGHT=TRITON_DTYPES[launch.of_right],
                CONTIGUOUS=launch.contiguous, ALIGNED=launch.wide_loads,
                b_m=launch.b_m, b_n=launch.b_n, b_t=32 if wide else 64,
                enable_fp_fusion=True, num_warps=8 if launch.b_m * launch.b_n > 4096 else 4,
                num_stages=stages_of(3, device),
            )  # fmt: skip
        found = (parts if splits == 1 else sum_slots(parts, len(members) * units, splits)).view(-1, units)
        if every:
            return found
        norms[into] = found
    return norms
