"""Many tensors in one launch: a table in memory says where each lies, how long it is, and which programs are its own.

A line of a table holds addresses, a length and the number of the tensor's first program. Lengths and addresses are read from
memory, so a step compiles each kernel once.
"""

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .launch import on_device_of, serves, table_on_device

COLUMNS = 1024
#: Elements of a gradient that one program measures.
LONG = 1 << 16


@triton.jit
def owner(p_table, width: tl.constexpr, lines, program):
    # The last line whose first program is not after this one; first programs stand last in their lines and do not decrease.
    low = 0
    high = lines
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(p_table + middle.to(tl.int64) * width + width - 1) <= program
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit(do_not_specialize=["units", "lines"])
def norms_kernel(p_table, p_parts, units, lines, each, b: tl.constexpr):
    # `each` elements of one unit's gradient of one tensor.
    program = tl.program_id(0)
    unit = tl.program_id(1).to(tl.int64)
    p_line = p_table + owner(p_table, 3, lines, program).to(tl.int64) * 3
    n = tl.load(p_line + 1)
    start = (program - tl.load(p_line + 2)) * each
    last = tl.minimum(n, start + each)
    p_row = tl.load(p_line).to(tl.pointer_type(tl.float32)) + unit * n
    total = tl.zeros((b,), tl.float32)
    for first in range(start, last, b):
        o_x = first + tl.arange(0, b)
        # [b]
        x = tl.load(p_row + o_x, mask=o_x < last, other=0.0)
        total += x * x
    tl.store(p_parts + unit * tl.num_programs(0) + program, tl.sum(total, 0))


@triton.jit(do_not_specialize=["units", "lines", "programs"])
def norm_parts_kernel(p_table, p_parts, p_out, units, lines, programs, b: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1).to(tl.int64)
    first = tl.load(p_table + line * 3 + 2).to(tl.int32)
    last = tl.load(p_table + line * 3 + 5, mask=line + 1 < lines, other=programs).to(tl.int32)
    total = tl.zeros((b,), tl.float32)
    for at in range(first, last, b):
        o_part = at + tl.arange(0, b)
        # [b]
        total += tl.load(p_parts + unit * programs + o_part, mask=o_part < last, other=0.0)
    tl.store(p_out + line * units + unit, tl.sum(total, 0))


@triton.jit(do_not_specialize=["units", "lines"])
def sums_kernel(p_table, p_weights, units, lines, b: tl.constexpr):
    program = tl.program_id(0)
    line = owner(p_table, 4, lines, program).to(tl.int64)
    p_line = p_table + line * 4
    n = tl.load(p_line + 2)
    o_x = (program - tl.load(p_line + 3)) * b + tl.arange(0, b)
    m_x = o_x < n
    p_row = tl.load(p_line).to(tl.pointer_type(tl.float32)) + o_x
    total = tl.zeros((b,), tl.float32)
    for unit in range(units):
        # A unit of weight 0 is not loaded: zero times NaN would be NaN.
        # [b]
        weight = tl.where(m_x, tl.load(p_weights + line * units + unit).to(tl.float32), 0.0)
        # [b]
        total += weight * tl.load(p_row, mask=weight != 0.0, other=0.0)
        p_row += n
    # [b]
    tl.store(tl.load(p_line + 1).to(tl.pointer_type(tl.float32)) + o_x, total, mask=m_x)


def first_programs(lengths: Sequence[int], each: int) -> tuple[list[int], int]:
    """Number of the first program of each tensor, and of all programs, where one program takes ``each`` elements."""
    ends = list(itertools.accumulate([-(-n // each) for n in lengths]))
    return [0, *ends[:-1]], ends[-1] if ends else 0


def _served(instances: Sequence[torch.Tensor]) -> bool:
    return {x.dtype for x in instances} == {torch.float32} and all(map(torch.Tensor.is_contiguous, instances))


@serves(1)
def instance_norms_group(instances: Sequence[torch.Tensor]) -> torch.Tensor:
    """Squared norms, float32 [k, B], of k contiguous float32 tensors [B, ...], in chunks whose parts are added up in order."""
    if not _served(instances):
        return NotImplemented
    units, device = instances[0].shape[0], instances[0].device
    out = torch.empty(len(instances), units, dtype=torch.float32, device=device)
    if out.numel():
        lengths = [x.numel() // units for x in instances]
        firsts, programs = first_programs(lengths, LONG)
        lines = [(x.data_ptr(), n, first) for x, n, first in zip(instances, lengths, firsts)]
        table = table_on_device(lines, out)
        parts = torch.empty(units, programs, dtype=torch.float32, device=device)
        with on_device_of(out):
            if programs:
                norms_kernel[(programs, units)](
                    table, parts, units, len(lines), LONG, b=COLUMNS, enable_fp_fusion=True, num_warps=4
                )
            norm_parts_kernel[(len(lines), units)](
                table, parts, out, units, len(lines), programs, b=128, enable_fp_fusion=True, num_warps=1
            )
    return out


@serves(1)
def instance_sum_group(instances: Sequence[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    """Sums over units of ``weights[i, b] instances[i][b]``, float32: contiguous float32 [B, ...], weights [k, B]. One launch."""
    if not _served(instances):
        return NotImplemented
    units = weights.shape[1]
    sums = [torch.empty(x.shape[1:], dtype=torch.float32, device=weights.device) for x in instances]
    lengths = [total.numel() for total in sums]
    firsts, programs = first_programs(lengths, COLUMNS)
    if programs:
        lines = [(x.data_ptr(), t.data_ptr(), n, first) for x, t, n, first in zip(instances, sums, lengths, firsts)]
        with on_device_of(weights):
            sums_kernel[(programs,)](
                table_on_device(lines, weights), weights.contiguous(), units, len(lines),
                b=COLUMNS, enable_fp_fusion=True, num_warps=4,
            )  # fmt: skip
    return sums
