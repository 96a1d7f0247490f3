"""The two tile products that norms are made of: rows against rows (Gram), and columns against columns over tokens (outer).

Rows, columns and tokens outside a factor are loaded as zero, so nothing of a neighbouring unit, not even a NaN, can
enter.
"""

import os

import triton
import triton.language as tl

from fastdp.ops.bounds import CHAIN

# The interpreter multiplies the bit patterns of bfloat16 as if they were integers: there, operands are widened first.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# There, numbers of a loop are Python's, which leave no rest beside a constexpr.
_CHAIN = CHAIN if INTERPRETED.value else tl.constexpr(CHAIN)


@triton.jit
def multiply(a, b, acc):
    """``acc + a @ b`` in float32; 16-bit operands are exact in the products, and float32 ones are not shortened."""
    if a.dtype != b.dtype or INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def gram_tile(
    p_a, o_a, m_a, stride_at, stride_ak, p_b, o_b, m_b, stride_bt, stride_bk, width,
    b_a: tl.constexpr, b_b: tl.constexpr, b_k: tl.constexpr,
):  # fmt: skip
    """[b_a, b_b]: the inner products of rows ``o_a`` of a [., width] and rows ``o_b`` of b [., width].

    Matrix units truncate what they add to their accumulator: it is emptied every `CHAIN` columns into a sum that is rounded.
    """
    total = tl.zeros((b_a, b_b), tl.float32)
    acc = tl.zeros((b_a, b_b), tl.float32)
    o_k = tl.arange(0, b_k)
    p_rows_a = p_a + o_a[:, None] * stride_at
    p_rows_b = p_b + o_b[None, :] * stride_bt
    for k in range(0, width, b_k):
        m_k = o_k < width - k
        o_ak = (k + o_k).to(tl.int64)
        # [b_a, b_k]
        a = tl.load(p_rows_a + o_ak[None, :] * stride_ak, mask=m_a[:, None] & m_k[None, :], other=0.0)
        # [b_k, b_b]
        b = tl.load(p_rows_b + o_ak[:, None] * stride_bk, mask=m_b[None, :] & m_k[:, None], other=0.0)
        acc = multiply(a, b, acc)
        if (k + b_k) % _CHAIN == 0:
            total += acc
            acc = tl.zeros((b_a, b_b), tl.float32)
    return total + acc


@triton.jit
def described_gram_tile(rows, first_a, first_b, width, b_t: tl.constexpr, b_k: tl.constexpr):
    """`gram_tile` of ``b_t`` rows from ``first_a`` and from ``first_b`` on, all read by one tensor descriptor."""
    total = tl.zeros((b_t, b_t), tl.float32)
    acc = tl.zeros((b_t, b_t), tl.float32)
    for k in range(0, width, b_k):
        acc = multiply(rows.load([first_a, k]), rows.load([first_b, k]).T, acc)
        if (k + b_k) % _CHAIN == 0:
            total += acc
            acc = tl.zeros((b_t, b_t), tl.float32)
    return total + acc


@triton.jit
def outer_tile(
    p_left, p_right, start, end, o_m, o_n, m_m, m_n, stride_lt, stride_lm, stride_rt, stride_rn,
    b_m: tl.constexpr, b_n: tl.constexpr, b_t: tl.constexpr,
):  # fmt: skip
    """[b_m, b_n]: the sum over tokens ``start .. end`` of left[t, o_m] right[t, o_n]."""
    acc = tl.zeros((b_m, b_n), tl.float32)
    o_t = tl.arange(0, b_t)
    p_l = p_left + o_m[:, None].to(tl.int64) * stride_lm + (start + o_t)[None, :].to(tl.int64) * stride_lt
    p_r = p_right + (start + o_t)[:, None].to(tl.int64) * stride_rt + o_n[None, :].to(tl.int64) * stride_rn
    for t in range(start, end, b_t):
        m_t = o_t < end - t
        # [b_m, b_t]
        left = tl.load(p_l, mask=m_m[:, None] & m_t[None, :], other=0.0)
        # [b_t, b_n]
        right = tl.load(p_r, mask=m_t[:, None] & m_n[None, :], other=0.0)
        acc = multiply(left, right, acc)
        p_l += b_t * stride_lt
        p_r += b_t * stride_rt
    return acc


@triton.jit
def listed_factors(p_line, LEFT: tl.constexpr, RIGHT: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr):
    """Addresses, widths and strides of two factors, the first eight fields of a line in a table of many matrices."""
    p_left = tl.load(p_line).to(tl.pointer_type(LEFT))
    p_right = tl.load(p_line + 1).to(tl.pointer_type(RIGHT))
    m = tl.load(p_line + 2).to(tl.int32)
    n = tl.load(p_line + 3).to(tl.int32)
    stride_lt = tl.load(p_line + 4).to(tl.int32)
    stride_lm = tl.load(p_line + 5).to(tl.int32)
    stride_rt = tl.load(p_line + 6).to(tl.int32)
    stride_rn = tl.load(p_line + 7).to(tl.int32)
    # What the launcher knows of all matrices, said so that Triton believes it: wide loads depend on it.
    if CONTIGUOUS:
        stride_lm = 1
        stride_rn = 1
    if ALIGNED:
        p_left = tl.multiple_of(p_left, 16)
        p_right = tl.multiple_of(p_right, 16)
        m = m // 8 * 8
        n = n // 8 * 8
        stride_lt = stride_lt // 8 * 8
        stride_rt = stride_rt // 8 * 8
    return p_left, p_right, m, n, stride_lt, stride_lm, stride_rt, stride_rn


@triton.jit
def load_flat(p_x, o_x, n, inside):
    """Elements ``o_x`` of a vector of ``n``: without a mask if the tile lies ``inside``, since one forbids wide loads."""
    if inside:
        x = tl.load(p_x + o_x)
    else:
        x = tl.load(p_x + o_x, mask=o_x < n, other=0.0)
    return x


@triton.jit
def store_flat(p_x, o_x, n, inside, x):
    """As `load_flat`."""
    if inside:
        tl.store(p_x + o_x, x)
    else:
        tl.store(p_x + o_x, x, mask=o_x < n)


@triton.jit
def unit_of_slot(p_offsets, slot, units, b_tile: tl.constexpr):
    """The unit that owns a slot. Slots number the row tiles of all units: unit b owns those from offsets[b] // b_tile + b.

    There are ``tokens // b_tile + units`` slots whatever the lengths, so a grid can be sized without asking the device.
    """
    before = 0
    for first in range(0, units, 1024):
        o_b = first + tl.arange(0, 1024)
        # [1024]
        offset = tl.load(p_offsets + o_b, mask=o_b < units, other=0)
        before += tl.sum(((o_b < units) & (offset // b_tile + o_b <= slot)).to(tl.int32), 0)
    return before - 1
