"""Inner products of two uses of one matrix (tied weights): ``sum over t, s of <L1_t, L2_s> <R1_t, R2_s>`` for each unit.

A left factor may be one-hot: two ids multiply to whether they are equal, an id and a dense row to the row's entry
there.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, gram_side, on_device_of, row_tile, splits_to_fill, stages_of, to_device_of
from .reduce import sum_parts
from .tiles import gram_tile, unit_of_slot

DENSE = tl.constexpr(0)
ID_AGAINST_DENSE = tl.constexpr(1)
IDS = tl.constexpr(2)


@triton.jit(do_not_specialize=["units", "slots", "splits"])
def cross_kernel(
    p_left1, p_right1, p_left2, p_right2, p_offsets1, p_offsets2, p_parts, m, n, units, slots, splits,
    stride_lt1, stride_lk1, stride_rt1, stride_rk1, stride_lt2, stride_lk2, stride_rt2, stride_rk2,
    KIND: tl.constexpr, b_t: tl.constexpr, b_k: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    split = tl.program_id(1)
    unit = unit_of_slot(p_offsets1, slot, units, b_t)
    start = tl.load(p_offsets1 + unit)
    end = tl.load(p_offsets1 + unit + 1)
    tile = slot - (start // b_t).to(tl.int32) - unit
    start2 = tl.load(p_offsets2 + unit)
    end2 = tl.load(p_offsets2 + unit + 1)
    o_row = start + tile * b_t + tl.arange(0, b_t)
    m_row = o_row < end
    total = 0.0
    if start + tile * b_t < end:
        if KIND != DENSE:
            # [b_t]
            ids = tl.load(p_left1 + o_row * stride_lt1, mask=m_row, other=-1)
        for first in tl.range(start2 + split * b_t, end2, splits * b_t, disable_licm=True):
            o_col = first + tl.arange(0, b_t)
            m_col = o_col < end2
            right = gram_tile(p_right1, o_row, m_row, stride_rt1, stride_rk1, p_right2, o_col, m_col, stride_rt2,
                              stride_rk2, n, b_t, b_t, b_k)  # fmt: skip
            if KIND == DENSE:
                left = gram_tile(p_left1, o_row, m_row, stride_lt1, stride_lk1, p_left2, o_col, m_col, stride_lt2,
                                 stride_lk2, m, b_t, b_t, b_k)  # fmt: skip
            elif KIND == IDS:
                # [b_t]
                ids2 = tl.load(p_left2 + o_col * stride_lt2, mask=m_col, other=-2)
                left = (ids[:, None] == ids2[None, :]).to(tl.float32)
            else:
                p_entry = p_left2 + o_col[None, :] * stride_lt2 + ids[:, None] * stride_lk2
                # [b_t, b_t]
                left = tl.load(p_entry, mask=m_row[:, None] & m_col[None, :], other=0.0).to(tl.float32)
            total += tl.sum(left * right)
    tl.store(p_parts + slot.to(tl.int64) * splits + split, total)


def cross_inner(
    left1: torch.Tensor,
    right1: torch.Tensor,
    left2: torch.Tensor,
    right2: torch.Tensor,
    offsets1: torch.Tensor,
    offsets2: torch.Tensor,
    splits: int | None = None,
) -> torch.Tensor:
    """Inner products [B], float32; left [., m] float or ids int64, right [., n] float, any strides; offsets [B + 1] each."""
    if left1.dim() == 2 and left2.dim() == 1:
        return cross_inner(left2, right2, left1, right1, offsets2, offsets1, splits)
    units, tokens = offsets1.shape[0] - 1, right1.shape[0]
    if units == 0 or tokens == 0 or right2.shape[0] == 0:
        return torch.zeros(units, dtype=torch.float32, device=right1.device)
    offsets1, offsets2 = to_device_of(offsets1, right1), to_device_of(offsets2, right1)
    kind = DENSE if left1.dim() == 2 else ID_AGAINST_DENSE if left2.dim() == 2 else IDS
    wide = torch.float32 in (left1.dtype, right1.dtype, left2.dtype, right2.dtype)
    b_t = row_tile(tokens, units, min(64 if kind is ID_AGAINST_DENSE else 128, gram_side(wide, right1.device)))
    slots = tokens // b_t + units
    splits = splits or splits_to_fill(right1, slots, cdiv(right2.shape[0], b_t))
    parts = torch.empty(1, slots * splits, dtype=torch.float32, device=right1.device)

    def strides(factor: torch.Tensor) -> tuple[int, ...]:
        return (*factor.stride(), 0)[:2]

    with on_device_of(right1):
        cross_kernel[(slots, splits)](
            left1, right1, left2, right2, offsets1, offsets2, parts,
            left1.shape[1] if left1.dim() == 2 else 0, right1.shape[1], units, slots, splits,
            *strides(left1), *strides(right1), *strides(left2), *strides(right2),
            KIND=kind.value, b_t=b_t, b_k=32 if wide else 64,
            enable_fp_fusion=True, num_warps=8 if wide or b_t == 128 else 4, num_stages=stages_of(3, right1.device),
        )  # fmt: skip
    return sum_parts(parts, offsets1, splits, b_t)[0]
