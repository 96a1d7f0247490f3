"""Per-unit gradients and their squared norms for many small matrices at once: the adapters of a LoRA step in one launch.

Addresses, shapes and strides of all problems stand in one table in device memory. A program has one matrix and one
unit: it makes the gradient tile by tile, stores it and adds up its squares in order, so there is nothing left to
reduce. Only where that would leave processors idle are the tiles of a gradient dealt to several programs.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastdp.ops.matrices import Matrices, MatrixForm

from .launch import (
    TRITON_DTYPES,
    Table,
    cdiv,
    indices_on_device,
    next_power_of_2,
    on_device_of,
    splits_to_fill,
    stages_of,
    to_device_of,
)
from .reduce import sum_slots
from .tiles import outer_tile

_FIELDS = tl.constexpr(12)
_WIDE_TILE = 128


@triton.jit(do_not_specialize=["units", "splits"])
def _grouped_kernel(
    p_table, p_offsets, p_norms, units, splits,
    NARROW: tl.constexpr, WIDE: tl.constexpr, CONTIGUOUS: tl.constexpr, NARROW_ALIGNED: tl.constexpr,
    WIDE_ALIGNED: tl.constexpr, b_m: tl.constexpr, b_n: tl.constexpr, b_t: tl.constexpr,
):  # fmt: skip
    problem = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    p_row = p_table + problem * _FIELDS
    narrow_at = tl.load(p_row)
    wide_at = tl.load(p_row + 1)
    out_at = tl.load(p_row + 2)
    m = tl.load(p_row + 3)
    n = tl.load(p_row + 4)
    stride_at = tl.load(p_row + 5)
    stride_ak = tl.load(p_row + 6)
    stride_bt = tl.load(p_row + 7)
    stride_bk = tl.load(p_row + 8)
    stride_ob = tl.load(p_row + 9)
    stride_om = tl.load(p_row + 10)
    stride_on = tl.load(p_row + 11)
    # What the launcher knows of all problems, said so that Triton believes it: wide loads depend on it.
    if NARROW_ALIGNED:
        m = m // 8 * 8
        stride_at = stride_at // 8 * 8
    if WIDE_ALIGNED:
        n = n // 8 * 8
        stride_bt = stride_bt // 8 * 8
    if CONTIGUOUS:
        stride_ak = 1
        stride_bk = 1
    p_narrow = narrow_at.to(tl.pointer_type(NARROW))
    p_wide = wide_at.to(tl.pointer_type(WIDE))
    if NARROW_ALIGNED:
        p_narrow = tl.multiple_of(p_narrow, 16)
    if WIDE_ALIGNED:
        p_wide = tl.multiple_of(p_wide, 16)
    p_out = out_at.to(tl.pointer_type(tl.float32)) + unit * stride_ob
    start = tl.load(p_offsets + unit)
    end = tl.load(p_offsets + unit + 1)
    total = 0.0
    for first_m in range(0, m, b_m):
        o_m = first_m + tl.arange(0, b_m)
        for first_n in range(split * b_n, n, splits * b_n):
            o_n = first_n + tl.arange(0, b_n)
            gradient = outer_tile(p_narrow, p_wide, start, end, o_m, o_n, o_m < m, o_n < n, stride_at, stride_ak,
                                  stride_bt, stride_bk, b_m, b_n, b_t)  # fmt: skip
            total += tl.sum(gradient * gradient)
            p_tile = p_out + o_m[:, None] * stride_om + o_n[None, :] * stride_on
            # [b_m, b_n]
            tl.store(p_tile, gradient, mask=(o_m < m)[:, None] & (o_n < n)[None, :])
    tl.store(p_norms + (problem * units + unit) * splits + split, total)


class _Launch(NamedTuple):
    """Matrices whose narrow and wide factors have the same dtypes."""

    narrow: torch.dtype
    wide: torch.dtype
    contiguous: bool
    narrow_aligned: bool
    wide_aligned: bool
    narrowest: int
    widest: int
    members: list[int]
    table: Table


@functools.lru_cache(maxsize=128)
def _launches(lefts: MatrixForm, rights: MatrixForm, wide_lefts: bytes, wide_rights: bytes) -> list[_Launch]:
    kinds: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    # Of the narrow and of the wide factor: which of the two lists it is in.
    sides = [(1, 0) if m > n else (0, 1) for m, n in zip(lefts.columns, rights.columns)]
    forms, read_wide = (lefts, rights), (wide_lefts, wide_rights)
    for i, (narrow, wide) in enumerate(sides):
        kinds.setdefault((forms[narrow].dtypes[i], forms[wide].dtypes[i]), []).append(i)
    found = []
    for kind, members in kinds.items():
        lines, fields = [], _FIELDS.value
        places: list[tuple[list[int], list[int]]] = [([], []), ([], []), ([], [])]
        for number, i in enumerate(members):
            own = [forms[side] for side in sides[i]]
            m, n = lefts.columns[i], rights.columns[i]
            # Gradients are rows of m n numbers, those of a row of the matrix beside each other.
            steps = (n, 1) if sides[i] == (0, 1) else (1, n)
            strides = [step for form in own for step in form.strides[i]]
            lines.append((0, 0, 0, *(form.columns[i] for form in own), *strides, m * n, *steps))
            for at, which in enumerate((*sides[i], 2)):
                places[which][0].append(number * fields + at)
                places[which][1].append(i)
        contiguous = all(form.strides[i][1] == 1 for i in members for form in forms)
        aligned = [all(read_wide[sides[i][at]][i] for i in members) for at in (0, 1)]
        widths = [max(forms[sides[i][at]].columns[i] for i in members) for at in (0, 1)]
        table = Table(lines, *places)
        found.append(_Launch(*kind, contiguous, aligned[0], aligned[1], widths[0], widths[1], members, table))
    return found


def per_unit_group(
    lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor], offsets: torch.Tensor, splits: int | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gradients of each unit for k matrices, float32 [B, m_i, n_i] each, and their squared norms, float32 [k, B].

    lefts [N, m_i] and rights [N, n_i]: float32, bfloat16 or float16, any strides; offsets int64 [B + 1]. One launch
    for all matrices whose narrow and wide factors have the same dtypes: in practice, one.
    """
    units = offsets.shape[0] - 1
    device = offsets.device if not rights else rights[0].device
    lefts, rights = Matrices.of(lefts), Matrices.of(rights)
    shapes = zip(lefts.form.columns, rights.form.columns)
    gradients = [torch.empty(units, m, n, dtype=torch.float32, device=device) for m, n in shapes]
    norms = torch.empty(len(lefts), units, dtype=torch.float32, device=device)
    if norms.numel() == 0:
        return gradients, norms
    launches = _launches(lefts.form, rights.form, lefts.wide, rights.wide)
    offsets, results = to_device_of(offsets, norms), Matrices(gradients)
    for launch in launches:
        members = launch.members
        b_m = min(64 if launch.contiguous else 32, max(16, next_power_of_2(launch.narrowest)))
        single = torch.float32 in (launch.narrow, launch.wide)
        programs = len(members) * units
        dealt = splits or splits_to_fill(norms, programs, cdiv(launch.widest, _WIDE_TILE))
        parts = torch.empty(1, programs * dealt, dtype=torch.float32, device=device)
        with on_device_of(norms):
            _grouped_kernel[(len(members), units, dealt)](
                launch.table.on_device_of(norms, lefts.addresses, rights.addresses, results.addresses),
                offsets, parts, units, dealt,
                NARROW=TRITON_DTYPES[launch.narrow], WIDE=TRITON_DTYPES[launch.wide], CONTIGUOUS=launch.contiguous,
                NARROW_ALIGNED=launch.narrow_aligned, WIDE_ALIGNED=launch.wide_aligned,
                b_m=b_m, b_n=_WIDE_TILE, b_t=32 if single else 64,
                enable_fp_fusion=True, num_warps=8 if single or b_m > 32 else 4, num_stages=stages_of(3, device),
            )  # fmt: skip
        of_members = parts if dealt == 1 else sum_slots(parts, programs, dealt)
        if len(launches) == 1:
            return gradients, of_members.view(len(lefts), units)
        norms[indices_on_device(members, norms)] = of_members.view(len(members), units)
    return gradients, norms
