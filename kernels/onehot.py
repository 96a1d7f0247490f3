"""One-hot left factors (embeddings): norms and sums of the rows of ``right`` that share an id.

Tokens are put in order of (unit, id) or of id alone, so equal ids are neighbours. A program that stands at the first
token of a run adds the run up, in its order: no atomics, and two runs of the program give the same bits.
"""

import torch
import triton
import triton.language as tl

from .launch import beside, on_device_of
from .reduce import sum_parts

_COLUMNS = 256


@triton.jit
def _add_run(p_order, p_keys, p_right, p_weights, at, tokens, o_n, m_n, stride_rt, stride_rn,
             b_t: tl.constexpr, b_n: tl.constexpr, WEIGHTED: tl.constexpr):  # fmt: skip
    # The sum, over tokens at, at + 1, ... with the key of `at`, of their rows of right; [b_n]
    key = tl.load(p_keys + at)
    total = tl.zeros((b_t, b_n), tl.float32)
    inside = tl.full((), 1, tl.int32)
    while inside != 0:
        o_t = at + tl.arange(0, b_t)
        m_t = o_t < tokens
        m_t = m_t & (tl.load(p_keys + o_t, mask=m_t, other=-1) == key)
        token = tl.load(p_order + o_t, mask=m_t, other=0)
        if WEIGHTED:
            # A token of weight 0 is not loaded: zero times NaN would be NaN.
            weight = tl.load(p_weights + token, mask=m_t, other=0.0).to(tl.float32)
            m_row = weight != 0.0
        else:
            m_row = m_t
        p_rows = p_right + token[:, None] * stride_rt + o_n[None, :].to(tl.int64) * stride_rn
        rows = tl.load(p_rows, mask=m_row[:, None] & m_n[None, :], other=0.0).to(tl.float32)
        total += weight[:, None] * rows if WEIGHTED else rows
        inside = tl.min(m_t.to(tl.int32), 0)
        at += b_t
    return tl.sum(total, 0)


@triton.jit
def _starts_a_run(p_keys, at):
    return (at == 0) | (tl.load(p_keys + at) != tl.load(p_keys + at - 1, mask=at > 0, other=-1))


@triton.jit(do_not_specialize=["tokens"])
def _norm_kernel(
    p_order, p_keys, p_right, p_parts, tokens, n, stride_rt, stride_rn, b_t: tl.constexpr, b_n: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    total = tl.zeros((b_n,), tl.float32)
    if _starts_a_run(p_keys, at):
        for first in range(0, n, b_n):
            o_n = first + tl.arange(0, b_n)
            row = _add_run(p_order, p_keys, p_right, p_right, at, tokens, o_n, o_n < n, stride_rt, stride_rn,
                           b_t, b_n, False)  # fmt: skip
            total += row * row
    # Slot of a tile of one token: see tiles.unit_of_slot.
    tl.store(p_parts + at + (tl.load(p_keys + at) >> 31), tl.sum(total, 0))


@triton.jit(do_not_specialize=["tokens"])
def _scatter_kernel(
    p_order, p_keys, p_right, p_weights, p_out, tokens, n, stride_rt, stride_rn, stride_om, stride_on,
    b_t: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * b_n + tl.arange(0, b_n)
    m_n = o_n < n
    if _starts_a_run(p_keys, at):
        row = _add_run(p_order, p_keys, p_right, p_weights, at, tokens, o_n, m_n, stride_rt, stride_rn, b_t, b_n, True)
        p_row = p_out + tl.load(p_keys + at) * stride_om + o_n.to(tl.int64) * stride_on
        tl.store(p_row, tl.load(p_row, mask=m_n) + row, mask=m_n)


def units_of_tokens(offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """The unit of each token, int64 [tokens], without asking the device how long units are."""
    return torch.searchsorted(offsets[1:], torch.arange(tokens, device=offsets.device), right=True)


def onehot_sqnorm(ids: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Squared norms [B], float32, of the gradients of a table: ids int64 [N] (below 2^31), right [N, n], any strides.

    Tokens of a unit that share an id add up before they are squared.
    """
    units, (tokens, n) = offsets.shape[0] - 1, right.shape
    if units == 0 or tokens == 0:
        return torch.zeros(units, dtype=torch.float32, device=right.device)
    offsets = beside(offsets, right)
    keys, order = torch.sort(units_of_tokens(offsets, tokens) << 31 | ids, stable=True)
    parts = torch.empty(1, tokens + units, dtype=torch.float32, device=right.device)
    with on_device_of(right):
        _norm_kernel[(tokens,)](
            order,
            keys,
            right,
            parts,
            tokens,
            n,
            *right.stride(),
            b_t=4,
            b_n=_COLUMNS,
            enable_fp_fusion=True,
            num_warps=4,
        )
    return sum_parts(parts, offsets, 1, 1)[0]


def onehot_weighted_sum_(out: torch.Tensor, ids: torch.Tensor, right: torch.Tensor, weights: torch.Tensor) -> None:
    """``out[ids[t]] += weights[t] right[t]`` for all tokens t; out float32 [V, n], right [N, n], any strides."""
    tokens, n = right.shape
    if tokens == 0 or n == 0:
        return
    keys, order = torch.sort(ids, stable=True)
    with on_device_of(out):
        _scatter_kernel[(tokens, triton.cdiv(n, _COLUMNS))](
            order,
            keys,
            right,
            weights,
            out,
            tokens,
            n,
            *right.stride(),
            *out.stride(),
            b_t=4,
            b_n=_COLUMNS,
            enable_fp_fusion=True,
            num_warps=4,
        )
