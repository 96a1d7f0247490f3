"""``snap``: the nearest row of a table, exactly, in O(N) times the number of groups of 32 rows.

A first pass on the matrix units, in bfloat16, gives ``|e|^2 / 2 - <x, e>`` up to a proven error for every pair, of
which only the least of each group of 32 rows of the table is kept. A second pass compares in float64 the rows of
those groups whose least is within twice the error of the least of all: a few groups for each x, all of them if all
are as near as that. No atomics: each x has one program, which takes groups in order, so ties go to the lowest index.
"""

import torch
import triton
import triton.language as tl

from fastdp.ops.snap import refuse_non_finite

from .launch import cdiv, next_power_of_2, on_device_of, stages_of
from .tiles import multiply

_GROUP = 32
#: Past every row that can be named, and what ``bad`` says when all rows are finite.
_NO_ROW = (1 << 63) - 1


@triton.jit(do_not_specialize=["rows"])
def survey_kernel(p_x, p_half, p_bad, rows, width, stride_t, stride_k, b_t: tl.constexpr, b_k: tl.constexpr):
    o_t = tl.program_id(0).to(tl.int64) * b_t + tl.arange(0, b_t)
    total = tl.zeros((b_t, b_k), tl.float32)
    finite = tl.full((b_t, b_k), 1, tl.int1)
    for k in range(0, width, b_k):
        o_k = k + tl.arange(0, b_k)
        m_x = (o_t < rows)[:, None] & (o_k < width)[None, :]
        p_tile = p_x + o_t[:, None] * stride_t + o_k[None, :].to(tl.int64) * stride_k
        # [b_t, b_k]
        x = tl.load(p_tile, mask=m_x, other=0.0).to(tl.float32)
        total += x * x
        finite = finite & (tl.abs(x) < float("inf"))
    # [b_t]
    tl.store(p_half + o_t, tl.sum(total, 1) * 0.5, mask=o_t < rows)
    good = tl.min(finite.to(tl.int32), 1)
    if tl.min(good, 0) == 0:
        tl.atomic_min(p_bad, tl.min(tl.where(good == 0, o_t, 9223372036854775807), 0))


@triton.jit(do_not_specialize=["rows", "size", "groups", "tiles_x"])
def nearest_group_kernel(
    p_x, p_table, p_half, p_least, rows, size, groups, tiles_x, width, stride_xt, stride_et, stride_ek,
    b_v: tl.constexpr, b_x: tl.constexpr, b_k: tl.constexpr, b_group: tl.constexpr,
):  # fmt: skip
    # Tiles of x go round fastest: a tile of the table is read from memory once and then from the second-level cache.
    tile_v = tl.program_id(0) // tiles_x
    o_v = tile_v * b_v + tl.arange(0, b_v)
    o_x = (tl.program_id(0) % tiles_x) * b_x + tl.arange(0, b_x)
    m_v = o_v < size
    m_x = o_x < rows
    p_e = p_table + o_v[:, None].to(tl.int64) * stride_et
    p_q = p_x + o_x[None, :].to(tl.int64) * stride_xt
    dot = tl.zeros((b_v, b_x), tl.float32)
    for k in range(0, width, b_k):
        o_k = k + tl.arange(0, b_k)
        m_k = o_k < width
        # [b_v, b_k]
        e = tl.load(p_e + o_k[None, :].to(tl.int64) * stride_ek, mask=m_v[:, None] & m_k[None, :], other=0.0)
        # [b_k, b_x]
        x = tl.load(p_q + o_k[:, None], mask=m_x[None, :] & m_k[:, None], other=0.0)
        dot = multiply(e.to(x.dtype), x, dot)
    # [b_v]
    score = tl.load(p_half + o_v, mask=m_v, other=float("inf"))[:, None] - dot
    least = tl.min(tl.reshape(score, (b_v // b_group, b_group, b_x)), 1)
    o_group = tile_v * (b_v // b_group) + tl.arange(0, b_v // b_group)
    p_out = p_least + o_x[None, :].to(tl.int64) * groups + o_group[:, None]
    # [b_v // b_group, b_x]
    tl.store(p_out, least, mask=m_x[None, :] & (o_group < groups)[:, None])


@triton.jit
def _exact(p_x, p_table, row, group, size, width, stride_xt, stride_xk, stride_et, stride_ek,
           b_group: tl.constexpr, b_k: tl.constexpr):  # fmt: skip
    # The least float64 squared distance in a group, and the first row that has it.
    o_v = group.to(tl.int64) * b_group + tl.arange(0, b_group)
    total = tl.zeros((b_group, b_k), tl.float64)
    for k in range(0, width, b_k):
        o_k = (k + tl.arange(0, b_k)).to(tl.int64)
        m_e = (o_v < size)[:, None] & (o_k < width)[None, :]
        # [b_k]
        x = tl.load(p_x + row * stride_xt + o_k * stride_xk, mask=o_k < width, other=0.0).to(tl.float64)
        # [b_group, b_k]
        e = tl.load(p_table + o_v[:, None] * stride_et + o_k[None, :] * stride_ek, mask=m_e, other=0.0).to(tl.float64)
        difference = tl.where(m_e, e - x[None, :], 0.0)
        total += difference * difference
    distance = tl.where(o_v < size, tl.sum(total, 1), float("inf"))
    least = tl.min(distance, 0)
    return least, tl.min(tl.where((distance == least) & (o_v < size), o_v, 9223372036854775807), 0)


@triton.jit(do_not_specialize=["size", "groups"])
def resolve_kernel(
    p_x, p_table, p_half_x, p_most, p_least, p_index, size, groups, width, stride_xt, stride_xk, stride_et, stride_ek,
    product_error, norm_error, b_scan: tl.constexpr, b_group: tl.constexpr, b_k: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    least = float("inf")
    for first in range(0, groups, b_scan):
        o_g = first + tl.arange(0, b_scan)
        # [b_scan]
        of_groups = tl.load(p_least + row * groups + o_g, mask=o_g < groups, other=float("inf"))
        least = tl.minimum(least, tl.min(of_groups, 0))
    most = tl.load(p_most)  # half the largest squared norm of the table
    # |x| |e| = 2 sqrt(half half); the last term covers products that underflow.
    error = product_error * 2.0 * tl.sqrt(tl.load(p_half_x + row)) * tl.sqrt(most) + norm_error * most + 1e-36
    limit = least + 2.0 * error
    best = tl.full((), float("inf"), tl.float64)
    index = tl.full((), 9223372036854775807, tl.int64)
    for first in range(0, groups, b_scan):
        o_g = first + tl.arange(0, b_scan)
        # [b_scan]
        score = tl.load(p_least + row * groups + o_g, mask=o_g < groups, other=float("inf"))
        # Written so that a limit that overflowed to an infinity or a NaN keeps every group.
        near = (o_g < groups) & ((score > limit) == 0)
        group = tl.min(tl.where(near, o_g, groups), 0)
        while group < groups:
            distance, which = _exact(p_x, p_table, row, group, size, width, stride_xt, stride_xk, stride_et, stride_ek,
                                     b_group, b_k)  # fmt: skip
            closer = (distance < best) | ((distance == best) & (which < index))
            best = tl.where(closer, distance, best)
            index = tl.where(closer, which, index)
            group = tl.min(tl.where(near & (o_g > group), o_g, groups), 0)
    tl.store(p_index + row, index)


def survey(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared norm of each row of x [N, d], float32 [N], and the first row that is not finite, int64 [1]."""
    rows, width = x.shape
    half = torch.empty(rows, dtype=torch.float32, device=x.device)
    bad = torch.full((1,), _NO_ROW, dtype=torch.int64, device=x.device)
    if rows:
        with on_device_of(x):
            survey_kernel[(cdiv(rows, 8),)](
                x, half, bad, rows, width, *x.stride(), b_t=8, b_k=256, enable_fp_fusion=True, num_warps=4
            )
    return half, bad


def named_bad_row(bad: torch.Tensor) -> int | None:
    """The row that ``survey`` found not to be finite, or None. Waits for the device."""
    row = int(bad)
    return None if row == _NO_ROW else row


def nearest_row(x: torch.Tensor, table: torch.Tensor, half_x: torch.Tensor, half_table: torch.Tensor) -> torch.Tensor:
    """Index int64 [N] of the row of table [V, d] nearest to each row of x [N, d] in float64, ties to the lowest index.

    Both finite, float32, bfloat16 or float16, any strides; ``half_*`` as `survey` returns them. Scratch: x in
    bfloat16 and one float32 for each x and 32 rows of the table.
    """
    (rows, width), size = x.shape, table.shape[0]
    index = torch.zeros(rows, dtype=torch.int64, device=x.device)
    if rows == 0 or width == 0:
        return index
    groups = cdiv(size, _GROUP)
    rounded = x.to(torch.bfloat16).contiguous()
    least = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    unit = 2.0**-9  # of rounding to bfloat16
    u_x, u_e = (0.0 if factor.dtype == torch.bfloat16 else unit for factor in (x, table))
    sums = (width + 16) * 2.0**-22  # of float32 sums of products, however the matrix unit rounds them
    b_x = min(128, max(16, next_power_of_2(rows)))
    tiles_x = cdiv(rows, b_x)
    with on_device_of(x):
        nearest_group_kernel[(cdiv(size, 128) * tiles_x,)](
            rounded, table, half_table, least, rows, size, groups, tiles_x, width,
            rounded.stride(0), *table.stride(),
            b_v=128, b_x=b_x, b_k=64, b_group=_GROUP,
            enable_fp_fusion=True, num_warps=8 if b_x == 128 else 4, num_stages=stages_of(3, x.device),
        )  # fmt: skip
        resolve_kernel[(rows,)](
            x, table, half_x, half_table.max(), least, index, size, groups, width, *x.stride(), *table.stride(),
            u_x + u_e + u_x * u_e + sums, sums,
            b_scan=1024, b_group=_GROUP, b_k=64, enable_fp_fusion=True, num_warps=4,
        )  # fmt: skip
    return index


def half_squares_of(**rows: torch.Tensor) -> list[torch.Tensor]:
    """Half the squared norms of each matrix's rows. Raises ValueError, naming the first row that is not finite."""
    surveys = [survey(x) for x in rows.values()]
    for (name, x), (_, bad) in zip(rows.items(), surveys):
        if named_bad_row(bad) is not None:
            refuse_non_finite(name, x)
    return [half for half, _ in surveys]


@torch.no_grad()
def snap(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The op: as `nearest_row`, after a look whether all rows are finite, which waits for the device."""
    half_table, half_x = half_squares_of(table=table, x=x)
    return nearest_row(x, table, half_x, half_table)
