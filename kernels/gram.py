"""Squared norms by Gram matrices: ``sum over t, s of <L_t, L_s> <R_t, R_s>`` for each unit, without any gradient.

A program has one tile of tokens of a unit and walks over the tiles before it, up to its own: both Gram matrices are
symmetric, so tiles below the diagonal count twice and those above are never made. Flop: T^2 (width of L + width of R) a
unit; the Gram matrices live in registers.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .launch import beside, on_device_of, row_tile, splits_to_fill
from .reduce import sum_parts
from .tiles import gram_tile, unit_of_slot


@triton.jit(do_not_specialize=["units", "slots", "splits"])
def _gram_kernel(
    lefts, widths, strides_lt, strides_lk, p_right, width, stride_rt, stride_rk, p_offsets, p_parts, units, slots, splits,
    COUNT: tl.constexpr, b_t: tl.constexpr, b_k: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The longest walks start first.
    slot = slots - 1 - tl.program_id(0)
    split = tl.program_id(1)
    unit = unit_of_slot(p_offsets, slot, units, b_t)
    start = tl.load(p_offsets + unit)
    end = tl.load(p_offsets + unit + 1)
    tile = slot - (start // b_t).to(tl.int32) - unit
    o_row = start + tile * b_t + tl.arange(0, b_t)
    m_row = o_row < end
    o_left = tl.arange(0, COUNT)
    total = tl.zeros((COUNT,), tl.float32)
    if start + tile * b_t < end:
        # Hoisting the addresses of every left factor out of this loop would spill registers.
        for other in tl.range(split, tile + 1, splits, disable_licm=True):
            o_col = start + other * b_t + tl.arange(0, b_t)
            m_col = o_col < end
            right = gram_tile(p_right, o_row, m_row, stride_rt, stride_rk, p_right, o_col, m_col, stride_rt, stride_rk,
                              width, b_t, b_t, b_k, PRECISION)  # fmt: skip
            right = right * tl.where(other == tile, 1.0, 2.0)
            for i in tl.static_range(COUNT):
                left = gram_tile(lefts[i], o_row, m_row, strides_lt[i], strides_lk[i], lefts[i], o_col, m_col,
                                 strides_lt[i], strides_lk[i], widths[i], b_t, b_t, b_k, PRECISION)  # fmt: skip
                total += tl.where(o_left == i, tl.sum(tl.sum(right * left, 1), 0), 0.0)
    o_part = (o_left.to(tl.int64) * slots + slot) * splits + split
    # [COUNT]
    tl.store(p_parts + o_part, total)


def gram_sqnorm_group(
    lefts: Sequence[torch.Tensor],
    right: torch.Tensor,
    offsets: torch.Tensor,
    precision: str = "ieee",
    splits: int | None = None,
) -> torch.Tensor:
    """Squared norms [k, B], float32, of k uses (lefts [N, m_i]) that share ``right`` [N, n]; offsets int64 [B + 1].

    The Gram matrix of ``right`` is made once for two uses, as many as the registers hold beside it. float32, bfloat16
    or float16, any strides, empty units. ``precision``: of products of float32 factors, ``ieee`` or ``tf32x3``.
    ``splits``: programs a row of tiles is dealt to.
    """
    units, tokens = offsets.shape[0] - 1, right.shape[0]
    if units == 0 or tokens == 0:
        return torch.zeros(len(lefts), units, dtype=torch.float32, device=right.device)
    offsets = beside(offsets, right)
    wide = any(factor.dtype == torch.float32 for factor in (right, *lefts))
    b_t = row_tile(tokens, units, 64 if wide else 128)
    slots = tokens // b_t + units
    splits = splits or splits_to_fill(right, slots, triton.cdiv(tokens, b_t))
    results = []
    with on_device_of(right):
        for pair in (lefts[i : i + 2] for i in range(0, len(lefts), 2)):
            parts = torch.empty(len(pair), slots * splits, dtype=torch.float32, device=right.device)
            _gram_kernel[(slots, splits)](
                tuple(pair),
                tuple(left.shape[1] for left in pair),
                tuple(left.stride(0) for left in pair),
                tuple(left.stride(1) for left in pair),
                right,
                right.shape[1],
                right.stride(0),
                right.stride(1),
                offsets,
                parts,
                units,
                slots,
                splits,
                COUNT=len(pair),
                b_t=b_t,
                b_k=32 if wide else 64,
                PRECISION=precision,
                enable_fp_fusion=True,
                num_warps=8 if wide or b_t == 128 else 4,
                num_stages=4,
            )
            results.append(sum_parts(parts, offsets, splits, b_t))
    # A norm far below its terms may come out below zero by their rounding.
    return torch.cat(results).clamp_min_(0.0)
