"""The scale of a unit's rounding errors, on GPUs: the sum over its tokens of ``|L_t| |R_t|``, and norms of chosen units.

A program of the products reads whole rows of a few tokens, once; another adds up the tokens of a unit in their order. A
program of the counts reads a row until an entry is not zero, so that only rows of padding are read whole.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fastdp.ops.factors import INT64_MAX
from fastdp.ops.matrices import Matrices

from . import direct, gram
from .launch import TRITON_DTYPES, cdiv, indices_on_device, on_device_of, serves, to_device_of

TOKENS = 16
COLUMNS = 256


@triton.jit
def _row_norms(p_x, o_t, m_t, width, stride_t, stride_k, b_t: tl.constexpr, b_k: tl.constexpr, ORDER: tl.constexpr):
    total = tl.zeros((b_t, b_k), tl.float32)
    some = tl.zeros((b_t, b_k), tl.int32)
    for k in range(0, width, b_k):
        o_k = (k + tl.arange(0, b_k)).to(tl.int64)
        m_x = m_t[:, None] & (o_k < width)[None, :]
        # [b_t, b_k]
        x = tl.load(p_x + o_t[:, None] * stride_t + o_k[None, :] * stride_k, mask=m_x, other=0.0).to(tl.float32)
        total += x * x if ORDER == 2 else tl.abs(x)
        some |= (x != 0.0).to(tl.int32)
    norm = tl.sum(total, 1).to(tl.float64)
    # PADDING covers entries whose squares underflow.
    if ORDER == 2:
        norm = tl.sqrt(norm + width * (gram.PADDING * gram.PADDING))
    else:
        norm += width * gram.PADDING
    return norm, tl.max(some, 1)


@triton.jit(do_not_specialize=["tokens"])
def products_kernel(
    p_left, p_right, p_out, tokens, m, n, stride_lt, stride_lk, stride_rt, stride_rk,
    b_t: tl.constexpr, b_k: tl.constexpr, ORDER: tl.constexpr, ONE_HOT: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0).to(tl.int64) * b_t + tl.arange(0, b_t)
    m_t = o_t < tokens
    product, some = _row_norms(p_right, o_t, m_t, n, stride_rt, stride_rk, b_t, b_k, ORDER)
    if not ONE_HOT:
        norm, others = _row_norms(p_left, o_t, m_t, m, stride_lt, stride_lk, b_t, b_k, ORDER)
        product *= norm
        some = some & others
    # A negative product marks a token that adds nothing.
    # [b_t]
    tl.store(p_out + o_t, tl.where((some == 0) & (product < float("inf")), -product, product), mask=m_t)


@triton.jit
def sum_units_kernel(p_products, p_offsets, p_out, p_counts, b: tl.constexpr):
    unit = tl.program_id(0).to(tl.int64)
    start = tl.load(p_offsets + unit)
    end = tl.load(p_offsets + unit + 1)
    total = tl.zeros((b,), tl.float64)
    count = tl.zeros((b,), tl.float64)
    for first in range(start, end, b):
        o_t = first + tl.arange(0, b)
        # [b]
        product = tl.load(p_products + o_t, mask=o_t < end, other=-1.0)
        total += tl.where(product < 0.0, 0.0, product)
        count += tl.where(product < 0.0, 0.0, 1.0)
    tl.store(p_out + unit, tl.sum(total, 0))
    tl.store(p_counts + unit, tl.sum(count, 0))


@serves(2)
def row_products(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, order: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums [B], float64, over each unit's tokens of the products of both rows' norms, and how many tokens add anything.

    left [N, m] or ids [N].
    """
    units, (tokens, n) = offsets.shape[0] - 1, right.shape
    sums, counts = (torch.empty(units, dtype=torch.float64, device=right.device) for _ in range(2))
    if units == 0 or tokens == 0:
        return sums.zero_(), counts.zero_()
    one_hot = left.dim() == 1
    products = torch.empty(tokens, dtype=torch.float64, device=right.device)
    with on_device_of(right):
        products_kernel[(cdiv(tokens, TOKENS),)](
            left, right, products, tokens, 0 if one_hot else left.shape[1], n,
            *((0, 0) if one_hot else left.stride()), *right.stride(),
            b_t=TOKENS, b_k=COLUMNS, ORDER=order, ONE_HOT=one_hot, num_warps=4,
        )  # fmt: skip
        sum_units_kernel[(units,)](products, to_device_of(offsets, right), sums, counts, b=128, num_warps=1)
    return sums, counts


@triton.jit
def _not_zero(p_x, o_t, m_t, width, stride_t, stride_k, b_k: tl.constexpr):
    # Which rows hold anything, int32 [b_t], as far as `m_t` asks: 1 for the others.
    some = 1 - m_t.to(tl.int32)
    k = 0
    while (k < width) & (tl.min(some, 0) == 0):
        o_k = (k + tl.arange(0, b_k)).to(tl.int64)
        m_x = (some == 0)[:, None] & (o_k < width)[None, :]
        # [b_t, b_k]
        x = tl.load(p_x + o_t[:, None] * stride_t + o_k[None, :] * stride_k, mask=m_x, other=0.0)
        some = tl.maximum(some, tl.max((x != 0.0).to(tl.int32), 1))
        k += b_k
    return some


@triton.jit(do_not_specialize=["units"])
def counts_kernel(
    p_lines, p_offsets, p_out, units,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, FIELDS: tl.constexpr, b_t: tl.constexpr, b_k: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    p_line = p_lines + pid // units * FIELDS
    unit = pid % units
    p_left = tl.load(p_line).to(tl.pointer_type(LEFT))
    p_right = tl.load(p_line + 1).to(tl.pointer_type(RIGHT))
    m = tl.load(p_line + 2).to(tl.int32)
    n = tl.load(p_line + 3).to(tl.int32)
    stride_lt = tl.load(p_line + 4)
    stride_lm = tl.load(p_line + 5)
    stride_rt = tl.load(p_line + 6)
    stride_rn = tl.load(p_line + 7)
    end = tl.load(p_offsets + unit + 1)
    count = tl.zeros((b_t,), tl.int32)
    for first in range(tl.load(p_offsets + unit), end, b_t):
        o_t = first + tl.arange(0, b_t)
        m_t = o_t < end
        m_t = m_t & (_not_zero(p_left, o_t, m_t, m, stride_lt, stride_lm, b_k) != 0)
        # [b_t]
        count += (m_t & (_not_zero(p_right, o_t, m_t, n, stride_rt, stride_rn, b_k) != 0)).to(tl.int32)
    tl.store(p_out + pid, tl.sum(count, 0).to(tl.float64))


@serves(2)
def token_counts(lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor], offsets: torch.Tensor) -> torch.Tensor:
    """Tokens [k, B], float64, at which both factors of a use hold anything; one launch for all of the same dtypes."""
    units, device = offsets.shape[0] - 1, rights[0].device
    counts = torch.empty(len(lefts), units, dtype=torch.float64, device=device)
    if counts.numel() == 0 or rights[0].shape[0] == 0:
        return counts.zero_()
    lefts, rights, offsets = Matrices.of(lefts), Matrices.of(rights), to_device_of(offsets, counts)
    if 0 in (*lefts.form.columns, *rights.form.columns):
        counts.zero_()
    for launch in direct.tables_of(lefts.form, rights.form, lefts.wide, rights.wide, (16, 16)):
        every = len(launch.members) == len(lefts)
        out = counts if every else counts.new_empty(len(launch.members), units)
        with on_device_of(counts):
            counts_kernel[(len(launch.members) * units,)](
                launch.table.on_device_of(counts, lefts.addresses, rights.addresses), offsets, out, units,
                LEFT=TRITON_DTYPES[launch.of_left], RIGHT=TRITON_DTYPES[launch.of_right], FIELDS=direct.FIELDS.value,
                b_t=32, b_k=128, num_warps=4,
            )  # fmt: skip
        if not every:
            counts[indices_on_device(launch.members, counts)] = out
    return counts


@serves(2)
def gram_norms(
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    counts: Sequence[int],
    offsets: torch.Tensor,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared norms [k, B], float32, of uses of which each right has ``counts``, and row products, float64."""
    # These kernels leave no unit out for its length.
    if most < INT64_MAX:
        return NotImplemented
    return gram.gram_norms(lefts, rights, counts, offsets)


chosen_sqnorm = serves(2)(direct.chosen_norms)
