"""One-hot left factors (embeddings): norms and sums of the rows of ``right`` that share an id.

Tokens are put in order of (unit, id) or of id alone, so equal ids are neighbours: a run. A program that stands at the first
token of a run adds the run up as far as its chunk of 32 tokens goes. Where it goes on (token types, padding), each further
chunk adds up its own part, and a second launch the parts, sixteen at a time: no walk is longer than a chunk, or than the
chunks by sixteen. No atomics, and two runs of the program give the same bits.
"""

import torch
import triton
import triton.language as tl

from .direct import ABSOLUTE, MASKED_SQUARE
from .launch import cached_with, on_device_of, to_device_of
from .reduce import sum_parts

COLUMNS = 256
_CHUNK = tl.constexpr(32)
_PARTS = tl.constexpr(16)


@triton.jit
def _add_run(p_order, p_keys, p_right, p_weights, at, tokens, o_n, m_n, stride_rt, stride_rn,
             b_t: tl.constexpr, b_n: tl.constexpr, WEIGHTED: tl.constexpr):  # fmt: skip
    # The sum, over tokens at, at + 1, ... with the key of `at`, of their rows of right, up to the end of the chunk; [b_n]
    tokens = tl.minimum(tokens, (at // _CHUNK + 1) * _CHUNK)
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
def _goes_on(p_keys, at, tokens):
    # Whether the run of token `at` does not end within the chunk.
    limit = (at // _CHUNK + 1) * _CHUNK
    return tl.load(p_keys + limit, mask=limit < tokens, other=-1) == tl.load(p_keys + at)


@triton.jit
def _part(p_sums, at, starts, side, n):
    # A chunk has up to two parts of runs that do not lie within it: of one that begins there, and of one that began before.
    return p_sums + ((at // _CHUNK * 2 + tl.where(starts, 0, 1)) * 2 + side) * n


@triton.jit
def _add_parts(p_sums, p_keys, chunk, tokens, side, o_n, m_n, n, b_n: tl.constexpr):
    # The sum of a run that begins in this chunk and goes on: its part here and those of the chunks that follow; [b_n]
    key = tl.load(p_keys + (chunk + 1) * _CHUNK)
    begun = tl.load(_part(p_sums, chunk * _CHUNK, True, side, n) + o_n, mask=m_n, other=0.0)
    total = tl.zeros((_PARTS, b_n), tl.float32)
    inside = tl.full((), 1, tl.int32)
    while inside != 0:
        o_c = chunk + 1 + tl.arange(0, _PARTS)
        m_c = o_c * _CHUNK < tokens
        # [_PARTS]
        m_c = m_c & (tl.load(p_keys + o_c * _CHUNK, mask=m_c, other=-1) == key)
        p_rows = p_sums + ((o_c * 2 + 1) * 2 + side)[:, None] * n + o_n[None, :]
        # [_PARTS, b_n]
        total += tl.load(p_rows, mask=m_c[:, None] & m_n[None, :], other=0.0)
        inside = tl.min(m_c.to(tl.int32), 0)
        chunk += _PARTS
    return begun + tl.sum(total, 0)


@triton.jit
def _begins_and_goes_on(p_keys, chunk, tokens):
    # Whether the chunk's last run begins in it and ends in another one.
    first = chunk * _CHUNK
    limit = first + _CHUNK
    key = tl.load(p_keys + limit - 1, mask=limit <= tokens, other=-2)
    before = tl.load(p_keys + first - 1, mask=first > 0, other=-1)
    return (key == tl.load(p_keys + limit, mask=limit < tokens, other=-1)) & (key != before)


@triton.jit
def _inside(p_mask, row, o_n, m_n, stride_mm, stride_mn):
    # [b_n]
    return tl.load(p_mask + row * stride_mm + o_n.to(tl.int64) * stride_mn, mask=m_n, other=0) != 0


@triton.jit
def _measure(row, total, outside, p_mask, key, o_n, m_n, stride_mm, stride_mn, KIND: tl.constexpr):
    if KIND == ABSOLUTE:
        total += tl.abs(row)
    elif KIND == MASKED_SQUARE:
        inside = _inside(p_mask, key & 0x7FFFFFFF, o_n, m_n, stride_mm, stride_mn)
        total += tl.where(inside, row * row, 0.0)
        outside += tl.where(inside, 0.0, row * row)
    else:
        total += row * row
    return total, outside


@triton.jit
def _store_measures(p_parts, slot, slots, total, outside, KIND: tl.constexpr):
    tl.store(p_parts + slot, tl.sum(total, 0))
    if KIND == MASKED_SQUARE:
        tl.store(p_parts + slots.to(tl.int64) + slot, tl.sum(outside, 0))


@triton.jit(do_not_specialize=["tokens", "slots"])
def _norm_kernel(
    p_order, p_keys, p_right, p_mask, p_parts, p_sums, tokens, slots, n, stride_rt, stride_rn, stride_mm, stride_mn,
    b_t: tl.constexpr, b_n: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    key = tl.load(p_keys + at)
    starts = _starts_a_run(p_keys, at)
    goes_on = _goes_on(p_keys, at, tokens)
    total = tl.zeros((b_n,), tl.float32)
    outside = tl.zeros((b_n,), tl.float32)
    if starts | (at % _CHUNK == 0):
        for first in range(0, n, b_n):
            o_n = first + tl.arange(0, b_n)
            m_n = o_n < n
            row = _add_run(p_order, p_keys, p_right, p_right, at, tokens, o_n, m_n, stride_rt, stride_rn,
                           b_t, b_n, False)  # fmt: skip
            if starts & (goes_on == 0):
                total, outside = _measure(row, total, outside, p_mask, key, o_n, m_n, stride_mm, stride_mn, KIND)
            else:
                # [b_n]
                tl.store(_part(p_sums, at, starts, 0, n) + o_n, row, mask=m_n)
    # Slot of a tile of one token: see tiles.unit_of_slot.
    _store_measures(p_parts, at + (key >> 31), slots, total, outside, KIND)


@triton.jit(do_not_specialize=["tokens", "slots"])
def long_norm_kernel(
    p_keys, p_mask, p_parts, p_sums, tokens, slots, n, stride_mm, stride_mn, b_n: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    if _begins_and_goes_on(p_keys, chunk, tokens):
        at = (chunk + 1) * _CHUNK - 1
        key = tl.load(p_keys + at)
        total = tl.zeros((b_n,), tl.float32)
        outside = tl.zeros((b_n,), tl.float32)
        for first in range(0, n, b_n):
            o_n = first + tl.arange(0, b_n)
            m_n = o_n < n
            row = _add_parts(p_sums, p_keys, chunk, tokens, 0, o_n, m_n, n, b_n)
            total, outside = _measure(row, total, outside, p_mask, key, o_n, m_n, stride_mm, stride_mn, KIND)
        # The slot of a token whose own program had nothing to measure.
        _store_measures(p_parts, at + (key >> 31), slots, total, outside, KIND)


@triton.jit
def _add_to_row(p_out, key, o_n, m_n, stride_om, stride_on, row):
    p_row = p_out + key * stride_om + o_n.to(tl.int64) * stride_on
    # [b_n]
    tl.store(p_row, tl.load(p_row, mask=m_n) + row, mask=m_n)


@triton.jit(do_not_specialize=["tokens"])
def scatter_kernel(
    p_order, p_keys, p_right, p_weights, p_outside, p_mask, p_out, p_sums, tokens, n,
    stride_rt, stride_rn, stride_om, stride_on, stride_mm, stride_mn,
    b_t: tl.constexpr, b_n: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * b_n + tl.arange(0, b_n)
    m_n = o_n < n
    starts = _starts_a_run(p_keys, at)
    if starts | (at % _CHUNK == 0):
        key = tl.load(p_keys + at)
        whole = starts & (_goes_on(p_keys, at, tokens) == 0)
        row = _add_run(p_order, p_keys, p_right, p_weights, at, tokens, o_n, m_n, stride_rt, stride_rn, b_t, b_n, True)
        if MASKED:
            other = _add_run(p_order, p_keys, p_right, p_outside, at, tokens, o_n, m_n, stride_rt, stride_rn,
                             b_t, b_n, True)  # fmt: skip
            if whole:
                row = tl.where(_inside(p_mask, key, o_n, m_n, stride_mm, stride_mn), row, other)
            else:
                # [b_n]
                tl.store(_part(p_sums, at, starts, 1, n) + o_n, other, mask=m_n)
        if whole:
            _add_to_row(p_out, key, o_n, m_n, stride_om, stride_on, row)
        else:
            # [b_n]
            tl.store(_part(p_sums, at, starts, 0, n) + o_n, row, mask=m_n)


@triton.jit(do_not_specialize=["tokens"])
def long_scatter_kernel(
    p_keys, p_mask, p_out, p_sums, tokens, n, stride_om, stride_on, stride_mm, stride_mn,
    b_n: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * b_n + tl.arange(0, b_n)
    m_n = o_n < n
    if _begins_and_goes_on(p_keys, chunk, tokens):
        key = tl.load(p_keys + (chunk + 1) * _CHUNK)
        row = _add_parts(p_sums, p_keys, chunk, tokens, 0, o_n, m_n, n, b_n)
        if MASKED:
            other = _add_parts(p_sums, p_keys, chunk, tokens, 1, o_n, m_n, n, b_n)
            row = tl.where(_inside(p_mask, key, o_n, m_n, stride_mm, stride_mn), row, other)
        _add_to_row(p_out, key, o_n, m_n, stride_om, stride_on, row)


def _parts_of_runs(tokens: int, n: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """Memory for two parts a chunk, each on both sides of a mask, and the number of chunks."""
    chunks = -(-tokens // _CHUNK.value)
    return torch.empty(chunks, 2, 2, n, dtype=torch.float32, device=device), chunks


def units_of_tokens(offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """The unit of each token, int64 [tokens], without asking the device how long units are."""

    def make() -> torch.Tensor:
        return torch.searchsorted(offsets[1:], torch.arange(tokens, device=offsets.device), right=True)

    return cached_with(offsets, ("units", tokens), make)


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
    offsets = to_device_of(offsets, right)
    keys, order = torch.sort(units_of_tokens(offsets, tokens) << 31 | ids, stable=True)
    parts = torch.empty(rows, tokens + units, dtype=torch.float32, device=right.device)
    sums, chunks = _parts_of_runs(tokens, n, right.device)
    bits = parts if mask is None else mask.view(torch.uint8)
    strides = (0, 0) if mask is None else mask.stride()
    with on_device_of(right):
        _norm_kernel[(tokens,)](
            order, keys, right, bits, parts, sums, tokens, tokens + units, n, *right.stride(), *strides,
            b_t=4, b_n=COLUMNS, KIND=measure, enable_fp_fusion=True, num_warps=4,
        )  # fmt: skip
        long_norm_kernel[(chunks,)](
            keys, bits, parts, sums, tokens, tokens + units, n, *strides, b_n=COLUMNS, KIND=measure, num_warps=4
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
    sums, chunks = _parts_of_runs(tokens, n, right.device)
    strides = bits.stride() if masked else (0, 0)
    columns = -(-n // COLUMNS)
    with on_device_of(out):
        scatter_kernel[(tokens, columns)](
            order, keys, right, weights, unmasked, bits, out, sums, tokens, n,
            *right.stride(), *out.stride(), *strides,
            b_t=4, b_n=COLUMNS, MASKED=masked, enable_fp_fusion=True, num_warps=4,
        )  # fmt: skip
        long_scatter_kernel[(chunks, columns)](
            keys, bits, out, sums, tokens, n, *out.stride(), *strides, b_n=COLUMNS, MASKED=masked, num_warps=4
        )
