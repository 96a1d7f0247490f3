"""Masks as bits: a bool matrix packed eight columns a byte, so that reading it with every unit costs next to nothing."""

import torch
import triton
import triton.language as tl

from .launch import cdiv, on_device_of


@triton.jit(do_not_specialize=["rows", "columns", "bytes_a_row"])
def pack_kernel(p_mask, p_bits, rows, columns, bytes_a_row, stride_m, stride_n, b: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64) * b + tl.arange(0, b)
    row = pid // bytes_a_row
    o_column = (pid % bytes_a_row)[:, None] * 8 + tl.arange(0, 8)[None, :]
    m_mask = (row < rows)[:, None] & (o_column < columns)
    # [b, 8]
    mask = tl.load(p_mask + row[:, None] * stride_m + o_column * stride_n, mask=m_mask, other=0)
    bits = tl.sum((mask != 0).to(tl.int32) << tl.arange(0, 8)[None, :], 1)
    # [b]
    tl.store(p_bits + pid, bits.to(tl.uint8), mask=row < rows)


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """bool [m, n] to uint8 [m, ceil(n / 8)]: column j is bit j % 8 of byte j // 8."""
    rows, columns = mask.shape
    bits = torch.empty(rows, cdiv(columns, 8), dtype=torch.uint8, device=mask.device)
    if bits.numel():
        with on_device_of(mask):
            pack_kernel[(cdiv(bits.numel(), 512),)](
                mask.view(torch.uint8),
                bits,
                rows,
                columns,
                bits.shape[1],
                *mask.stride(),
                b=512,
                enable_fp_fusion=True,
                num_warps=4,
            )
    return bits


@triton.jit
def load_mask(p_bits, o_m, o_n, m_m, m_n, bytes_a_row):
    """bool [b_m, b_n] of a packed mask; False outside."""
    p_byte = p_bits + o_m[:, None].to(tl.int64) * bytes_a_row + (o_n // 8)[None, :]
    # [b_m, b_n]
    byte = tl.load(p_byte, mask=m_m[:, None] & m_n[None, :], other=0).to(tl.int32)
    return (byte >> (o_n % 8)[None, :]) & 1 != 0
