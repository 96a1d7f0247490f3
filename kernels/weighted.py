"""Weighted sums of all tokens' gradients: one matrix product over the tokens, weights applied on load.

A block of tokens is multiplied with its weights divided by the largest of them, and the product added with that
largest weight as a factor, in float32. Where one unit fills the block, and so one weight, the quotient is 1 and
nothing is rounded: with 16-bit factors the sum of a clipped unit is then as long as it was clipped to, not longer by
a rounding of its rows. Tokens of weight 0 are not loaded, so a NaN in one never meets the sum.
"""

import torch
import triton
import triton.language as tl

from .chacha import normals
from .direct import side_tile
from .launch import beside, on_device_of, splits_to_fill
from .mask import load_mask, pack_mask
from .noise import add_noise_
from .tiles import multiply


@triton.jit
def _block_scale(weight):
    scale = tl.max(tl.abs(weight), 0)
    return scale, weight / tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _store(p_out, p_position, acc, o_m, o_n, m, n, stride_om, stride_on, std,
           b_m: tl.constexpr, b_n: tl.constexpr, NOISY: tl.constexpr):  # fmt: skip
    p_tile = p_out + o_m[:, None].to(tl.int64) * stride_om + o_n[None, :].to(tl.int64) * stride_on
    m_tile = (o_m < m)[:, None] & (o_n < n)[None, :]
    if NOISY:
        # n is a multiple of 16, so each block of normals lies within a row.
        o_block = (tl.min(o_n, 0) // 16 + tl.arange(0, b_n // 16))[None, :] + o_m[:, None].to(tl.int64) * (n // 16)
        z = normals(p_position, tl.reshape(o_block, (b_m * b_n // 16,)).to(tl.uint32), False)
        acc = tl.fma(tl.reshape(z, (b_m, b_n)), std, acc)
    tl.store(p_tile, tl.load(p_tile, mask=m_tile, other=0.0) + acc, mask=m_tile)


@triton.jit(do_not_specialize=["tokens", "length", "tiles_n"])
def _weighted_kernel(
    p_left, p_right, p_weights, p_out, p_position, tokens, length, tiles_n, m, n,
    stride_lt, stride_lm, stride_rt, stride_rn, stride_split, stride_om, stride_on, std,
    b_m: tl.constexpr, b_n: tl.constexpr, b_t: tl.constexpr, NOISY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1).to(tl.int64)
    o_m = (tile // tiles_n) * b_m + tl.arange(0, b_m)
    o_n = (tile % tiles_n) * b_n + tl.arange(0, b_n)
    start = split * length
    end = tl.minimum(start + length, tokens)
    p_l = p_left + o_m[:, None].to(tl.int64) * stride_lm
    p_r = p_right + o_n[None, :].to(tl.int64) * stride_rn
    acc = tl.zeros((b_m, b_n), tl.float32)
    for t in range(start, end, b_t):
        o_t = t + tl.arange(0, b_t)
        weight = tl.load(p_weights + o_t, mask=o_t < end, other=0.0).to(tl.float32)
        m_t = weight != 0.0
        scale, quotient = _block_scale(weight)
        left = tl.load(p_l + o_t[None, :] * stride_lt, mask=(o_m < m)[:, None] & m_t[None, :], other=0.0)
        right = tl.load(p_r + o_t[:, None] * stride_rt, mask=m_t[:, None] & (o_n < n)[None, :], other=0.0)
        left = (left.to(tl.float32) * quotient[None, :]).to(left.dtype)
        acc += scale * multiply(left, right, tl.zeros((b_m, b_n), tl.float32), PRECISION)
    _store(p_out + split * stride_split, p_position, acc, o_m, o_n, m, n, stride_om, stride_on, std, b_m, b_n,
           NOISY)  # fmt: skip


@triton.jit
def _selected(left, right, quotient, zero, PRECISION: tl.constexpr):
    kept = quotient != 0.0
    left = tl.where(kept[None, :], left.to(tl.float32) * quotient[None, :], 0.0).to(left.dtype)
    return multiply(left, tl.where(kept[:, None], right, 0.0).to(right.dtype), zero, PRECISION)


@triton.jit(do_not_specialize=["tokens", "length", "tiles_n", "bytes_a_row"])
def _masked_weighted_kernel(
    p_left, p_right, p_inside, p_outside, p_bits, p_out, tokens, length, tiles_n, m, n, bytes_a_row,
    stride_lt, stride_lm, stride_rt, stride_rn, stride_split, stride_om, stride_on,
    b_m: tl.constexpr, b_n: tl.constexpr, b_t: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1).to(tl.int64)
    o_m = (tile // tiles_n) * b_m + tl.arange(0, b_m)
    o_n = (tile % tiles_n) * b_n + tl.arange(0, b_n)
    start = split * length
    end = tl.minimum(start + length, tokens)
    p_l = p_left + o_m[:, None].to(tl.int64) * stride_lm
    p_r = p_right + o_n[None, :].to(tl.int64) * stride_rn
    inside = load_mask(p_bits, o_m, o_n, o_m < m, o_n < n, bytes_a_row)
    acc = tl.zeros((b_m, b_n), tl.float32)
    for t in range(start, end, b_t):
        o_t = t + tl.arange(0, b_t)
        weight_inside = tl.load(p_inside + o_t, mask=o_t < end, other=0.0).to(tl.float32)
        weight_outside = tl.load(p_outside + o_t, mask=o_t < end, other=0.0).to(tl.float32)
        m_t = (weight_inside != 0.0) | (weight_outside != 0.0)
        scale_inside, quotient_inside = _block_scale(weight_inside)
        scale_outside, quotient_outside = _block_scale(weight_outside)
        left = tl.load(p_l + o_t[None, :] * stride_lt, mask=(o_m < m)[:, None] & m_t[None, :], other=0.0)
        right = tl.load(p_r + o_t[:, None] * stride_rt, mask=m_t[:, None] & (o_n < n)[None, :], other=0.0)
        zero = tl.zeros((b_m, b_n), tl.float32)
        # Within a unit both quotients are 1, and one product serves both sides of the mask.
        scaled = (left.to(tl.float32) * quotient_inside[None, :]).to(left.dtype)
        product = multiply(scaled, right, zero, PRECISION)
        other = product
        if tl.max((quotient_inside != quotient_outside).to(tl.int32), 0) != 0:
            # Selection on both factors: what is left out on one side of the mask may be a NaN.
            product = _selected(left, right, quotient_inside, zero, PRECISION)
            other = _selected(left, right, quotient_outside, zero, PRECISION)
        acc += tl.where(inside, scale_inside * product, scale_outside * other)
    p_tile = (
        p_out + split * stride_split + o_m[:, None].to(tl.int64) * stride_om + o_n[None, :].to(tl.int64) * stride_on
    )
    m_tile = (o_m < m)[:, None] & (o_n < n)[None, :]
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
    std: float = 0.0,
    position: torch.Tensor | None = None,
    secure_rounding: bool = False,
    precision: str = "ieee",
    splits: int | None = None,
) -> None:
    """``out += sum over t of weights[t] left[t] right[t]^T``, plus ``std`` times the normals of ``position`` if given.

    ``out`` float32 [m, n], any strides; left [N, m] and right [N, n] float32, bfloat16 or float16, any strides;
    weights [N] float32. Noise is made in the epilogue where n is a multiple of 16, else in a pass of its own; it is
    the same noise. ``splits``: parts of the token axis, added up in order.
    """
    tokens, m, n = right.shape[0], left.shape[1], right.shape[1]
    wide = torch.float32 in (left.dtype, right.dtype)
    noisy = position is not None and std != 0.0
    b_m, b_n, b_t = side_tile(m, wide), side_tile(n, wide), 32 if wide else 64
    tiles_n = triton.cdiv(n, b_n)
    tiles = triton.cdiv(m, b_m) * tiles_n
    parts, stride, splits, length = _split(out, tokens, tiles, b_t, splits)
    fused = noisy and not secure_rounding and splits == 1 and n % 16 == 0
    if fused and b_m * b_n > 8192:  # the state of the cipher has to fit into the registers beside the sum
        b_n = 64
        tiles_n = triton.cdiv(n, b_n)
        tiles = triton.cdiv(m, b_m) * tiles_n
    if tiles and (tokens or fused):
        with on_device_of(out):
            _weighted_kernel[(tiles, splits)](
                left,
                right,
                weights,
                parts,
                beside(position, out) if fused and position is not None else parts,
                tokens,
                length,
                tiles_n,
                m,
                n,
                *left.stride(),
                *right.stride(),
                stride,
                *parts.stride()[-2:],
                std,
                b_m=b_m,
                b_n=b_n,
                b_t=b_t,
                NOISY=fused,
                PRECISION=precision,
                enable_fp_fusion=True,
                num_warps=8 if b_m * b_n > 4096 else 4,
                num_stages=3,
            )
    if splits > 1:
        out += parts.sum(0)
    if noisy and not fused and position is not None:
        add_noise_(out, std, position, secure_rounding)


def masked_weighted_sum_(
    out: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    weights_masked: torch.Tensor,
    weights_unmasked: torch.Tensor,
    mask: torch.Tensor,
    precision: str = "ieee",
    splits: int | None = None,
) -> None:
    """As :func:`weighted_sum_`, with ``weights_masked`` where ``mask`` (bool [m, n]) is True, else ``weights_unmasked``."""
    tokens, m, n = right.shape[0], left.shape[1], right.shape[1]
    if tokens == 0 or m == 0 or n == 0:
        return
    wide = torch.float32 in (left.dtype, right.dtype)
    b_m, b_n, b_t = side_tile(m, wide), min(64, side_tile(n, wide)), 32 if wide else 64
    tiles_n = triton.cdiv(n, b_n)
    tiles = triton.cdiv(m, b_m) * tiles_n
    bits = pack_mask(mask)
    parts, stride, splits, length = _split(out, tokens, tiles, b_t, splits)
    with on_device_of(out):
        _masked_weighted_kernel[(tiles, splits)](
            left,
            right,
            weights_masked,
            weights_unmasked,
            bits,
            parts,
            tokens,
            length,
            tiles_n,
            m,
            n,
            bits.shape[1],
            *left.stride(),
            *right.stride(),
            stride,
            *parts.stride()[-2:],
            b_m=b_m,
            b_n=b_n,
            b_t=b_t,
            PRECISION=precision,
            enable_fp_fusion=True,
            num_warps=8 if wide or b_m * b_n > 4096 else 4,
            num_stages=3,
        )
    if splits > 1:
        out += parts.sum(0)
