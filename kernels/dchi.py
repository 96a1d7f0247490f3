"""Rows of a table plus d_chi noise, one token a program: the first half of ``private_snap``.

Token i draws its direction from blocks ``D i + b`` of its position (D = ceil(d / 16)) and attempt a at its radius
from block ``2^32 - 1 - (16 i + a)``: Marsaglia and Tsang's method for Gamma(d, 1), in float64, with all 16 attempts
made at once.
"""

import torch
import triton
import triton.language as tl

from fastdp.ops.dchi import refuse_overflow

from .chacha import chacha_words, normals
from .launch import cdiv, next_power_of_2, on_device_of, to_device_of
from .snap import half_squares_of, named_bad_row, nearest_row, survey

_ATTEMPTS = tl.constexpr(16)


@triton.jit
def _column(u, which: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, 4)[None, :] == which, u, 0.0), 1)


@triton.jit
def _gamma(p_position, token, shape):
    # Gamma(shape, 1) of a token, float64
    attempt = tl.arange(0, _ATTEMPTS)
    block = 4294967295 - (token * _ATTEMPTS + attempt)
    words, _ = chacha_words(p_position, block.to(tl.uint32), tl.full((), 0, tl.uint32))
    low, high = tl.split(tl.reshape(words, (_ATTEMPTS, 4, 2)))
    whole = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    u = (whole.to(tl.float64) + 0.5) * 5.421010862427522e-20  # 2^-64
    d = shape - 0.3333333333333333
    c = 1.0 / tl.sqrt(9.0 * d)
    x = tl.sqrt(-2.0 * tl.log(_column(u, 0))) * tl.cos(6.283185307179586 * _column(u, 1))
    base = tl.maximum(1.0 + c * x, 0.0)
    v = base * base * base
    # The logarithm of a rejected v = 0 is never used.
    bound = 0.5 * x * x + d - d * v + d * tl.log(tl.where(v > 0.0, v, 1.0))
    accepted = (v > 0.0) & (tl.log(_column(u, 2)) < bound)
    first = tl.min(tl.where(accepted, attempt, _ATTEMPTS - 1), 0)
    return d * tl.sum(tl.where(attempt == first, v, 0.0), 0)


@triton.jit(do_not_specialize=["width"])
def dchi_kernel(
    p_table, p_ids, p_eta, p_position, p_out, width, stride_eta, stride_et, stride_ek, b_blocks: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    blocks = (width + 15) // 16
    o_block = tl.arange(0, b_blocks)
    z = normals(p_position, (token * blocks + o_block).to(tl.uint32), False)
    o_k = o_block[:, None] * 16 + tl.arange(0, 16)[None, :]
    m_k = o_k < width
    z = tl.where(m_k, z, 0.0).to(tl.float64)
    length = tl.sqrt(tl.sum(tl.sum(z * z, 1), 0))
    radius = _gamma(p_position, token, width.to(tl.float64)) / (length * tl.load(p_eta + token * stride_eta))
    row = tl.load(p_ids + token)
    # [b_blocks, 16]
    e = tl.load(p_table + row * stride_et + o_k.to(tl.int64) * stride_ek, mask=m_k, other=0.0).to(tl.float32)
    # [b_blocks, 16]
    tl.store(p_out + token * width + o_k, e + (z * radius).to(tl.float32), mask=m_k)


def dchi_rows(ids: torch.Tensor, table: torch.Tensor, eta: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """``table[ids] + noise / eta``, float32 [N, d]: ids int64 [N], eta float64, one or [N]; noise at ``position``."""
    width = table.shape[1]
    out = torch.empty(ids.numel(), width, dtype=torch.float32, device=table.device)
    if out.numel() == 0:
        return out
    b_blocks = next_power_of_2(cdiv(width, 16))
    with on_device_of(table):
        dchi_kernel[(ids.numel(),)](
            table, ids, to_device_of(eta, table), to_device_of(position, table), out, width,
            int(eta.numel() > 1), *table.stride(),
            b_blocks=b_blocks, enable_fp_fusion=True, num_warps=min(8, max(1, b_blocks // 32)),
        )  # fmt: skip
    return out


@torch.no_grad()
def private_snap(ids: torch.Tensor, table: torch.Tensor, eta: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The op: the nearest row of ``table`` to each noisy row. Waits for the device, to refuse what is not finite."""
    (half_table,) = half_squares_of(table=table)
    noisy = dchi_rows(ids.reshape(-1).contiguous(), table, eta.reshape(-1), position)
    half_noisy, bad = survey(noisy)
    refuse_overflow(named_bad_row(bad) is None)
    return nearest_row(noisy, table, half_noisy, half_table).view(ids.shape)


def dchi_vectors(eta: torch.Tensor, width: int, position: torch.Tensor) -> torch.Tensor:
    """The op: the noise of ``private_snap`` about a row of zeros, float32 [N, width]; eta float64 [N]."""
    origin = torch.zeros(1, width, device=eta.device)
    return dchi_rows(torch.zeros_like(eta, dtype=torch.int64), origin, eta.contiguous(), position)
