"""Norms by tiles of each unit's gradient: squared, absolute, and squared under a mask and outside it.

A program makes one tile of one unit's gradient in registers, over all tokens of the unit, and keeps only its sum.
Flop: 2 T m n a unit; the factors are read once for each row or column of tiles, mostly from the second-level cache.
"""

import torch
import triton
import triton.language as tl

from .launch import beside, has_wide_tiles, on_device_of
from .mask import load_mask, pack_mask
from .reduce import sum_slots
from .tiles import outer_tile

SQUARE = tl.constexpr(0)
ABSOLUTE = tl.constexpr(1)
MASKED_SQUARE = tl.constexpr(2)


@triton.jit(do_not_specialize=["units", "tiles_n", "tiles"])
def _direct_kernel(
    p_left, p_right, p_offsets, p_bits, p_chosen, p_parts, units, tiles_n, tiles, m, n, bytes_a_row,
    stride_lt, stride_lm, stride_rt, stride_rn,
    b_m: tl.constexpr, b_n: tl.constexpr, b_t: tl.constexpr, KIND: tl.constexpr, CHOSEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # All tiles of a unit run close together in time: its factors stay in the second-level cache.
    pid = tl.program_id(0).to(tl.int64)
    unit = pid // tiles
    tile = (pid % tiles).to(tl.int32)
    o_m = (tile // tiles_n) * b_m + tl.arange(0, b_m)
    o_n = (tile % tiles_n) * b_n + tl.arange(0, b_n)
    m_m = o_m < m
    m_n = o_n < n
    start = tl.load(p_offsets + unit)
    end = tl.load(p_offsets + unit + 1)
    if CHOSEN:  # a unit that was not chosen has no tokens here
        end = tl.where(tl.load(p_chosen + unit) != 0, end, start)
    gradient = outer_tile(p_left, p_right, start, end, o_m, o_n, m_m, m_n, stride_lt, stride_lm, stride_rt, stride_rn,
                          b_m, b_n, b_t, PRECISION)  # fmt: skip
    if KIND == ABSOLUTE:
        tl.store(p_parts + pid, tl.sum(tl.sum(tl.abs(gradient), 1), 0))
    else:
        square = gradient * gradient
        if KIND == MASKED_SQUARE:
            inside = load_mask(p_bits, o_m, o_n, m_m, m_n, bytes_a_row)
            tl.store(p_parts + pid, tl.sum(tl.sum(tl.where(inside, square, 0.0), 1), 0))
            square = tl.where(inside, 0.0, square)
            tl.store(p_parts + units.to(tl.int64) * tiles + pid, tl.sum(tl.sum(square, 1), 0))
        else:
            tl.store(p_parts + pid, tl.sum(tl.sum(square, 1), 0))


def side_tile(width: int, wide: bool) -> int:
    """Side of the tiles of a gradient that is ``width`` wide: 128 (64 for float32 factors), or less for narrow ones."""
    return min(64 if wide else 128, max(16, triton.next_power_of_2(width)))


def direct_norms(
    left: torch.Tensor,
    right: torch.Tensor,
    offsets: torch.Tensor,
    measure: int,
    mask: torch.Tensor | None = None,
    precision: str = "ieee",
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norms [1, B], float32, of left [N, m] and right [N, n]; float32, bfloat16 or float16, any strides.

    With ``mask`` (bool [m, n]), [2, B]: of the entries where it is True, then where it is False.
    With ``chosen`` (bool [B], on the device), 0 for the units where it is False, which cost nothing.
    """
    units, m, n = offsets.shape[0] - 1, left.shape[1], right.shape[1]
    rows = 1 if mask is None else 2
    if units == 0 or m == 0 or n == 0:
        return torch.zeros(rows, units, dtype=torch.float32, device=right.device)
    offsets = beside(offsets, right)
    bits = None if mask is None else pack_mask(mask)
    wide = torch.float32 in (left.dtype, right.dtype)
    b_m, b_n = side_tile(m, wide), side_tile(n, wide)
    if not wide and mask is None and b_m == 128 and n >= 256 and has_wide_tiles(right.device):
        b_n = 256  # reads a quarter fewer bytes for each product, which is what these tiles wait for
    tiles_n = triton.cdiv(n, b_n)
    tiles = triton.cdiv(m, b_m) * tiles_n
    parts = torch.empty(rows, units * tiles, dtype=torch.float32, device=right.device)
    with on_device_of(right):
        _direct_kernel[(units * tiles,)](
            left,
            right,
            offsets,
            parts if bits is None else bits,
            parts if chosen is None else chosen.view(torch.uint8),
            parts,
            units,
            tiles_n,
            tiles,
            m,
            n,
            0 if bits is None else bits.shape[1],
            *left.stride(),
            *right.stride(),
            b_m=b_m,
            b_n=b_n,
            b_t=32 if wide else 64,
            KIND=measure,
            CHOSEN=chosen is not None,
            PRECISION=precision,
            enable_fp_fusion=True,
            num_warps=8 if b_m * b_n > 4096 else 4,
            num_stages=3,
        )
    return sum_slots(parts, units, tiles)
