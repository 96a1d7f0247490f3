"""What rounding is measured by, on GPUs: the sum over a unit's tokens of ``|L_t| |R_t|``, and norms of chosen units.

A program of the products reads whole rows of a few tokens, once; another adds up the tokens of a unit in their order.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fastdp.ops.factors import INT64_MAX

from . import direct, gram
from .launch import cdiv, on_device_of, serves, to_device_of

TOKENS = 16
COLUMNS = 256


@triton.jit
def _row_norms(p_x, o_t, m_t, width, stride_t, stride_k, b_t: tl.constexpr, b_k: tl.constexpr, ORDER: tl.constexpr):
    total = tl.zeros((b_t, b_k), tl.float32)
    for k in range(0, width, b_k):
        o_k = (k + tl.arange(0, b_k)).to(tl.int64)
        m_x = m_t[:, None] & (o_k < width)[None, :]
        # [b_t, b_k]
        x = tl.load(p_x + o_t[:, None] * stride_t + o_k[None, :] * stride_k, mask=m_x, other=0.0).to(tl.float32)
        total += x * x if ORDER == 2 else tl.abs(x)
    norm = tl.sum(total, 1).to(tl.float64)
    if ORDER == 2:
        norm = tl.sqrt(norm + width.to(tl.float64) * (gram.PADDING * gram.PADDING))
    else:
        norm += width.to(tl.float64) * gram.PADDING
    return norm


@triton.jit(do_not_specialize=["tokens"])
def products_kernel(
    p_left, p_right, p_out, tokens, m, n, stride_lt, stride_lk, stride_rt, stride_rk,
    b_t: tl.constexpr, b_k: tl.constexpr, ORDER: tl.constexpr, ONE_HOT: tl.constexpr,
):  # fmt: skip
    o_t = tl.program_id(0).to(tl.int64) * b_t + tl.arange(0, b_t)
    m_t = o_t < tokens
    product = _row_norms(p_right, o_t, m_t, n, stride_rt, stride_rk, b_t, b_k, ORDER)
    if not ONE_HOT:
        product *= _row_norms(p_left, o_t, m_t, m, stride_lt, stride_lk, b_t, b_k, ORDER)
    # [b_t]
    tl.store(p_out + o_t, product, mask=m_t)


@triton.jit
def sum_units_kernel(p_products, p_offsets, p_out, b: tl.constexpr):
    unit = tl.program_id(0).to(tl.int64)
    start = tl.load(p_offsets + unit)
    end = tl.load(p_offsets + unit + 1)
    total = tl.zeros((b,), tl.float64)
    for first in range(start, end, b):
        o_t = first + tl.arange(0, b)
        # [b]
        total += tl.load(p_products + o_t, mask=o_t < end, other=0.0)
    tl.store(p_out + unit, tl.sum(total, 0))


@serves(2)
def row_products(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, order: int) -> torch.Tensor:
    """Sums [B], float64, over each unit's tokens of the products of both rows' norms; left [N, m] or ids [N]."""
    units, (tokens, n) = offsets.shape[0] - 1, right.shape
    sums = torch.zeros(units, dtype=torch.float64, device=right.device)
    if units == 0 or tokens == 0:
        return sums
    one_hot = left.dim() == 1
    products = torch.empty(tokens, dtype=torch.float64, device=right.device)
    with on_device_of(right):
        products_kernel[(cdiv(tokens, TOKENS),)](
            left,
            right,
            products,
            tokens,
            0 if one_hot else left.shape[1],
            n,
            *((0, 0) if one_hot else left.stride()),
            *right.stride(),
            b_t=TOKENS,
            b_k=COLUMNS,
            ORDER=order,
            ONE_HOT=one_hot,
            num_warps=4,
        )
        sum_units_kernel[(units,)](products, to_device_of(offsets, right), sums, b=128, num_warps=1)
    return sums


def token_counts(lefts: Sequence[torch.Tensor], right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """By the definition: on a GPU padding counts among a unit's tokens, and nothing asks."""
    return NotImplemented


@serves(2)
def gram_norms(
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    counts: Sequence[int],
    offsets: torch.Tensor,
    scales: Sequence[torch.Tensor],
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared norms [k, B], float32, of uses of which each right has ``counts``, and row products, float64."""
    if scales or most < INT64_MAX:
        return NotImplemented
    return gram.gram_norms(lefts, rights, counts, offsets)


chosen_sqnorm = serves(2)(direct.chosen_norms)
