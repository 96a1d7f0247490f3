"""The token axis cut into blocks of one unit each, as a table on the device: what a loop over all units walks along.

A block never holds tokens of two units, so a weight belongs to a whole block, and the loop over blocks needs no
loop over units within it: its loads and products overlap across the boundary of units, however short these are.
"""

import torch
import triton
import triton.language as tl

from .launch import cached_with, on_device_of

#: A word of the table: tokens in the block (7 bits), its unit.
COUNT_MASK = tl.constexpr(127)
UNIT_SHIFT = tl.constexpr(7)


@triton.jit(do_not_specialize=["units", "slots", "b_t"])
def blocks_kernel(p_offsets, p_table, units, slots, b_t):
    unit = tl.program_id(0)
    before = 0
    for first in range(0, unit, 1024):
        o_b = first + tl.arange(0, 1024)
        m_b = o_b < unit
        # [1024]
        start = tl.load(p_offsets + o_b, mask=m_b, other=0)
        end = tl.load(p_offsets + o_b + 1, mask=m_b, other=0)
        before += tl.sum(((end - start + b_t - 1) // b_t).to(tl.int32), 0)
    start = tl.load(p_offsets + unit).to(tl.int32)
    length = tl.load(p_offsets + unit + 1).to(tl.int32) - start
    here = (length + b_t - 1) // b_t
    for first in range(0, here, 128):
        o_s = first + tl.arange(0, 128)
        m_s = o_s < here
        count = tl.minimum(length - o_s * b_t, b_t)
        # [128]
        tl.store(p_table + 1 + before + o_s, start + o_s * b_t, mask=m_s)
        tl.store(p_table + 1 + slots + before + o_s, count | (unit << UNIT_SHIFT), mask=m_s)
    if unit == units - 1:
        tl.store(p_table, before + here)


def blocks_of(offsets: torch.Tensor, tokens: int, b_t: int) -> tuple[torch.Tensor, int]:
    """The table of blocks of at most ``b_t`` tokens (16 to 64), and how many it may hold at most.

    int32 [1 + 2 slots]: how many there are, the first token of each, and a word of each. Made once for each tensor of
    offsets (int64 [B + 1], on the device), without asking the device how long units are.
    """
    units, slots = offsets.shape[0] - 1, tokens // b_t + offsets.shape[0] - 1

    def make() -> torch.Tensor:
        table = torch.empty(1 + 2 * slots, dtype=torch.int32, device=offsets.device)
        with on_device_of(offsets):
            blocks_kernel[(units,)](offsets, table, units, slots, b_t=b_t, num_warps=4)
        return table

    return cached_with(offsets, ("blocks", b_t, tokens), make), slots
