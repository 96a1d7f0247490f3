"""Weighted sums of all tokens' gradients: one matrix product over the tokens, weights applied on load.

A block of tokens is multiplied with its weights divided by the largest of them, and the product added with that
largest weight as a factor, in float32. Where one unit fills the block, and so one weight, the quotient is 1, nothing is
rounded, and 16-bit factors meet as they are. Where units meet in a block, rows times quotients are multiplied as float32:
rounded to 16 bits, they would make the sum of a clipped unit longer than it was clipped to. Tokens of weight 0 are not
loaded, so a NaN in one never meets the sum.
"""

import torch
import triton
import triton.language as tl

from .direct import side_tile
from .launch import on_device_of, splits_to_fill
from .mask import load_mask, pack_mask
from .tiles import multiply


@triton.jit
def _block_scale(weight):
    scale = tl.max(tl.abs(weight), 0)
    return scale, weight / tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _scaled_product(left, right, quotient, zero, PRECISION: tl.constexpr):
    return multiply(left * quotient[None, :], right, zero, PRECISION)


@triton.jit
def _selected(left, right, quotient, zero, PRECISION: tl.constexpr):
    kept = quotient != 0.0
    left, right = tl.where(kept[None, :], left, 0.0), tl.where(kept[:, None], right, 0.0)
    return _scaled_product(left, right, quotient, zero, PRECISION)


@triton.jit(do_not_specialize=["tokens", "length", "tiles_n", "bytes_a_row"])
def _weighted_kernel(
    p_left, p_right, p_weights, p_outside, p_bits, p_out, tokens, length, tiles_n, m, n, bytes_a_row,
    stride_lt, stride_lm, stride_rt, stride_rn, stride_split, stride_om, stride_on,
    b_m: tl.constexpr, b_n: tl.constexpr, b_t: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1).to(tl.int64)
    o_m = (tile // tiles_n) * b_m + tl.arange(0, b_m)
    o_n = (tile % tiles_n) * b_n + tl.arange(0, b_n)
    start = split * length
    end = tl.minimum(start + length, tokens)
    p_l = p_left + o_m[:, None].to(tl.int64) * stride_lm
    p_r = p_right + o_n[None, :].to(tl.int64) * stride_rn
    if MASKED:
        inside = load_mask(p_bits, o_m, o_n, o_m < m, o_n < n, bytes_a_row)
    acc = tl.zeros((b_m, b_n), tl.float32)
    for t in range(start, end, b_t):
        o_t = t + tl.arange(0, b_t)
        # [b_t]
        weight = tl.load(p_weights + o_t, mask=o_t < end, other=0.0).to(tl.float32)
        m_t = weight != 0.0
        scale, quotient = _block_scale(weight)
        if MASKED:
            # [b_t]
            weight_outside = tl.load(p_outside + o_t, mask=o_t < end, other=0.0).to(tl.float32)
            m_t = m_t | (weight_outside != 0.0)
            scale_outside, quotient_outside = _block_scale(weight_outside)
        # [b_m, b_t]
        left = tl.load(p_l + o_t[None, :] * stride_lt, mask=(o_m < m)[:, None] & m_t[None, :], other=0.0)
        # [b_t, b_n]
        right = tl.load(p_r + o_t[:, None] * stride_rt, mask=m_t[:, None] & (o_n < n)[None, :], other=0.0)
        zero = tl.zeros((b_m, b_n), tl.float32)
        if MASKED:
            product = _scaled_product(left, right, quotient, zero, PRECISION)
            other = product
            # Within a unit both quotients are 1, and one product serves both sides of the mask.
            if tl.max((quotient != quotient_outside).to(tl.int32), 0) != 0:
                # Selection on both factors: what is left out on one side of the mask may be a NaN.
                product = _selected(left, right, quotient, zero, PRECISION)
                other = _selected(left, right, quotient_outside, zero, PRECISION)
            acc += tl.where(inside, scale * product, scale_outside * other)
        elif left.dtype == tl.float32 and right.dtype == tl.float32:
            acc += scale * _scaled_product(left, right, quotient, zero, PRECISION)
        else:
            product = multiply(left, right, zero, PRECISION)
            # The rows of tokens of weight 0 are zeros.
            if tl.max(((quotient != 1.0) & (quotient != 0.0)).to(tl.int32), 0) != 0:
                product = _scaled_product(left.to(tl.float32), right.to(tl.float32), quotient, zero, "tf32x3")
            acc += scale * product
    p_rows = p_out + split * stride_split + o_m[:, None].to(tl.int64) * stride_om
    p_tile = p_rows + o_n[None, :].to(tl.int64) * stride_on
    m_tile = (o_m < m)[:, None] & (o_n < n)[None, :]
    # [b_m, b_n]
    tl.store(p_tile, tl.load(p_tile, mask=m_tile, other=0.0) + acc, mask=m_tile)


def _split(
    out: torch.Tensor, tokens: int, tiles: int, b_t: int, splits: int | None
) -> tuple[torch.Tensor, int, int, int]:
    """Where the parts of a sum go (``out`` itself when there is one), their stride, their number and tokens in each."""
    splits = splits or splits_to_fill(out, tiles, triton.cdiv(tokens, 8 * b_t))
    if splits == 1:
        return out, 0, 1, tokens
    parts = torch.zeros(splits, *out.shape, dtype=torch.float32, device=out.device)
    return parts, parts.stride(0), splits, triton.cdiv(triton.cdiv(tokens, splits), b_t) * b_t


def weighted_sum_(
    out: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    weights: torch.Tensor,
    weights_unmasked: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    precision: str = "ieee",
    splits: int | None = None,
) -> None:
    """``out += sum over t of weights[t] left[t] right[t]^T``; where ``mask`` is False, of ``weights_unmasked``.

    ``out`` float32 [m, n], any strides; left [N, m] and right [N, n] float32, bfloat16 or float16, any strides;
    weights [N] float32; mask bool [m, n]. ``splits``: parts of the token axis, added up in order.
    """
    tokens, m, n = right.shape[0], left.shape[1], right.shape[1]
    if tokens == 0 or m == 0 or n == 0:
        return
    masked = mask is not None and weights_unmasked is not None
    if masked and not left.dtype == right.dtype == torch.float32:
        # Tiles for both sides of a mask leave no registers to tell apart blocks that one unit fills.
        left, right, precision = left.float(), right.float(), "tf32x3"
    wide = torch.float32 in (left.dtype, right.dtype)
    b_m, b_n, b_t = side_tile(m, wide), side_tile(n, wide), 32 if wide else 64
    if masked:
        b_n = min(64, b_n)
    tiles_n = triton.cdiv(n, b_n)
    tiles = triton.cdiv(m, b_m) * tiles_n
    # A kernel without a mask never reads these, and has no optional arguments.
    unmasked = weights if weights_unmasked is None else weights_unmasked
    bits = weights if mask is None else pack_mask(mask)
    parts, stride, splits, length = _split(out, tokens, tiles, b_t, splits)
    with on_device_of(out):
        _weighted_kernel[(tiles, splits)](
            left,
            right,
            weights,
            unmasked,
            bits,
            parts,
            tokens,
            length,
            tiles_n,
            m,
            n,
            bits.shape[-1],
            *left.stride(),
            *right.stride(),
            stride,
            *parts.stride()[-2:],
            b_m=b_m,
            b_n=b_n,
            b_t=b_t,
            MASKED=masked,
            PRECISION=precision,
            enable_fp_fusion=True,
            num_warps=8 if masked and wide or b_m * b_n > 4096 else 4,
            num_stages=3,
        )
    if splits > 1:
        out += parts.sum(0)
