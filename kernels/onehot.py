"""One-hot left factors (embeddings): norms and sums of the rows of ``right`` that share an id.

Tokens are put in order of (unit, id) or of id alone, so equal ids are neighbours. A program that stands at the first
token of a run adds the run up, in its order: no atomics, and two runs of the program give the same bits.
"""

import torch
import triton
import triton.language as tl

from .direct import ABSOLUTE, MASKED_SQUARE
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
        # [b_t]
        m_t = m_t & (tl.load(p_keys + o_t, mask=m_t, other=-1) == key)
        # [b_t]
        token = tl.load(p_order + o_t, mask=m_t, other=0)
        if WEIGHTED:
            # A token of weight 0 is not loaded: zero times NaN would be NaN.
            # [b_t]
            weight = tl.load(p_weights + token, mask=m_t, other=0.0).to(tl.float32)
            m_row = weight != 0.0
        else:
            m_row = m_t
        p_rows = p_right + token[:, None] * stride_rt + o_n[None, :].to(tl.int64) * stride_rn
        # [b_t, b_n]
        rows = tl.load(p_rows, mask=m_row[:, None] & m_n[None, :], other=0.0).to(tl.float32)
        total += weight[:, None] * rows if WEIGHTED else rows
        inside = tl.min(m_t.to(tl.int32), 0)
        at += b_t
    return tl.sum(total, 0)


@triton.jit
def _starts_a_run(p_keys, at):
    return (at == 0) | (tl.load(p_keys + at) != tl.load(p_keys + at - 1, mask=at > 0, other=-1))


@triton.jit
def _inside(p_mask, row, o_n, m_n, stride_mm, stride_mn):
    # [b_n]
    return tl.load(p_mask + row * stride_mm + o_n.to(tl.int64) * stride_mn, mask=m_n, other=0) != 0


@triton.jit(do_not_specialize=["tokens", "slots"])
def _norm_kernel(
    p_order, p_keys, p_right, p_mask, p_parts, tokens, slots, n, stride_rt, stride_rn, stride_mm, stride_mn,
    b_t: tl.constexpr, b_n: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    key = tl.load(p_keys + at)
    total = tl.zeros((b_n,), tl.float32)
    outside = tl.zeros((b_n,), tl.float32)
    if _starts_a_run(p_keys, at):
        for first in range(0, n, b_n):
            o_n = first + tl.arange(0, b_n)
            m_n = o_n < n
            row = _add_run(p_order, p_keys, p_right, p_right, at, tokens, o_n, m_n, stride_rt, stride_rn,
                           b_t, b_n, False)  # fmt: skip
            if KIND == ABSOLUTE:
                total += tl.abs(row)
            elif KIND == MASKED_SQUARE:
                inside = _inside(p_mask, key & 0x7FFFFFFF, o_n, m_n, stride_mm, stride_mn)
                total += tl.where(inside, row * row, 0.0)
                outside += tl.where(inside, 0.0, row * row)
            else:
                total += row * row
    # Slot of a tile of one token: see tiles.unit_of_slot.
    slot = at + (key >> 31)
    tl.store(p_parts + slot, tl.sum(total, 0))
    if KIND == MASKED_SQUARE:
        tl.store(p_parts + slots.to(tl.int64) + slot, tl.sum(outside, 0))


@triton.jit(do_not_specialize=["tokens"])
def _scatter_kernel(
    p_order, p_keys, p_right, p_weights, p_outside, p_mask, p_out, tokens, n,
    stride_rt, stride_rn, stride_om, stride_on, stride_mm, stride_mn,
    b_t: tl.constexpr, b_n: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * b_n + tl.arange(0, b_n)
    m_n = o_n < n
    if _starts_a_run(p_keys, at):
        key = tl.load(p_keys + at)
        row = _add_run(p_order, p_keys, p_right, p_weights, at, tokens, o_n, m_n, stride_rt, stride_rn, b_t, b_n, True)
        if MASKED:
            other = _add_run(p_order, p_keys, p_right, p_outside, at, tokens, o_n, m_n, stride_rt, stride_rn,
                             b_t, b_n, True)  # fmt: skip
            row = tl.where(_inside(p_mask, key, o_n, m_n, stride_mm, stride_mn), row, other)
        p_row = p_out + key * stride_om + o_n.to(tl.int64) * stride_on
        # [b_n]
        tl.store(p_row, tl.load(p_row, mask=m_n) + row, mask=m_n)


def units_of_tokens(offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """The unit of each token, int64 [tokens], without asking the device how long units are."""
    return torch.searchsorted(offsets[1:], torch.arange(tokens, device=offsets.device), right=True)


def onehot_norms(
    ids: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, measure: int, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Norms [1, B], float32, of the gradients of a table: ids int64 [N] (below 2^31), right [N, n], any strides.

    Tokens of a unit that share an id add up before they are measured. With ``mask`` (bool [V, n]), [2, B]: of the
    entries where it is True, then where it is False.
    """
    units, (tokens, n), rows = offsets.shape[0] - 1, right.shape, 1 if mask is None else 2
    if units == 0 or tokens == 0:
        return torch.zeros(rows, units, dtype=torch.float32, device=right.device)
    offsets = beside(offsets, right)
    keys, order = torch.sort(units_of_tokens(offsets, tokens) << 31 | ids, stable=True)
    parts = torch.empty(rows, tokens + units, dtype=torch.float32, device=right.device)
    with on_device_of(right):
        _norm_kernel[(tokens,)](
            order,
            keys,
            right,
            parts if mask is None else mask.view(torch.uint8),
            parts,
            tokens,
            tokens + units,
            n,
            *right.stride(),
            *((0, 0) if mask is None else mask.stride()),
            b_t=4,
            b_n=_COLUMNS,
            KIND=measure,
            enable_fp_fusion=True,
            num_warps=4,
        )
    return sum_parts(parts, offsets, 1, 1)


def onehot_weighted_sum_(
    out: torch.Tensor,
    ids: torch.Tensor,
    right: torch.Tensor,
    weights: torch.Tensor,
    weights_unmasked: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> None:
    """``out[ids[t]] += weights[t] right[t]`` for all tokens t; out float32 [V, n], right [N, n], any strides.

    Where ``mask`` (bool [V, n]) is False the weights are ``weights_unmasked``.
    """
    tokens, n = right.shape
    if tokens == 0 or n == 0:
        return
    keys, order = torch.sort(ids, stable=True)
    masked = mask is not None and weights_unmasked is not None
    # A kernel without a mask never reads these, and has no optional arguments.
    unmasked = weights if weights_unmasked is None else weights_unmasked
    bits = weights if mask is None else mask.view(torch.uint8)
    with on_device_of(out):
        _scatter_kernel[(tokens, triton.cdiv(n, _COLUMNS))](
            order,
            keys,
            right,
            weights,
            unmasked,
            bits,
            out,
            tokens,
            n,
            *right.stride(),
            *out.stride(),
            *(bits.stride() if masked else (0, 0)),
            b_t=4,
            b_n=_COLUMNS,
            MASKED=masked,
            enable_fp_fusion=True,
            num_warps=4,
        )
