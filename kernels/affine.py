"""Per-unit gradients of a layer norm's weight and bias: sums of ``g (x - mean) rstd`` and of ``g`` over a unit's tokens.

A program has some columns of one unit, or of a part of its tokens where units alone do not fill the device; parts are added
up in order by a second launch.
"""

import torch
import triton
import triton.language as tl

from .launch import beside, on_device_of, splits_to_fill

_COLUMNS = 64
_TOKENS = 16
#: Tokens that each part of a unit has about.
_PART = 256


@triton.jit(do_not_specialize=["units", "splits"])
def _affine_kernel(
    p_gradient, p_x, p_mean, p_rstd, p_offsets, p_out, units, splits, n, stride_gt, stride_gn, stride_xt, stride_xn,
    b_t: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    o_n = tl.program_id(1) * b_n + tl.arange(0, b_n)
    m_n = o_n < n
    start = tl.load(p_offsets + unit)
    length = tl.load(p_offsets + unit + 1) - start
    first = start + length * split // splits
    last = start + length * (split + 1) // splits
    weight = tl.zeros((b_t, b_n), tl.float32)
    bias = tl.zeros((b_t, b_n), tl.float32)
    for token in range(first, last, b_t):
        o_t = token + tl.arange(0, b_t)
        m_t = o_t < last
        m_tile = m_t[:, None] & m_n[None, :]
        # [b_t, b_n]
        g = tl.load(
            p_gradient + o_t[:, None] * stride_gt + o_n[None, :].to(tl.int64) * stride_gn, mask=m_tile, other=0.0
        )
        # [b_t, b_n]
        x = tl.load(p_x + o_t[:, None] * stride_xt + o_n[None, :].to(tl.int64) * stride_xn, mask=m_tile, other=0.0)
        # [b_t]
        mean = tl.load(p_mean + o_t, mask=m_t, other=0.0).to(tl.float32)
        rstd = tl.load(p_rstd + o_t, mask=m_t, other=0.0).to(tl.float32)
        g = g.to(tl.float32)
        weight += tl.where(m_tile, g * ((x.to(tl.float32) - mean[:, None]) * rstd[:, None]), 0.0)
        bias += g
    p_row = p_out + (split.to(tl.int64) * 2 * units + unit) * n + o_n
    # [b_n]
    tl.store(p_row, tl.sum(weight, 0), mask=m_n)
    tl.store(p_row + units.to(tl.int64) * n, tl.sum(bias, 0), mask=m_n)


def affine_sums(
    gradient: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Float32 [2, B, n]: of the weight, then of the bias; gradient and x [N, n] float32, bfloat16 or float16, any strides."""
    units, (tokens, n) = offsets.shape[0] - 1, x.shape
    columns = -(-n // _COLUMNS)
    splits = splits_to_fill(x, units * columns, max(1, tokens // max(1, units) // _PART))
    sums = torch.empty(splits, 2, units, n, dtype=torch.float32, device=x.device)
    if sums.numel():
        with on_device_of(x):
            _affine_kernel[(units, columns, splits)](
                gradient,
                x,
                mean.contiguous(),
                rstd.contiguous(),
                beside(offsets, x),
                sums,
                units,
                splits,
                n,
                *gradient.stride(),
                *x.stride(),
                b_t=_TOKENS,
                b_n=_COLUMNS,
                num_warps=4,
            )
    return sums[0] if splits == 1 else sums.sum(0)
