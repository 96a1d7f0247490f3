"""Per-unit gradients of layer norms' weights and biases: sums of ``g (x - mean) rstd`` and of ``g`` over a unit's tokens.

Addresses and strides of all norms stand in one table in device memory. A program has some columns of one norm and unit, or of
a part of its tokens where these alone do not fill the device; parts are added up in order by a second launch.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastdp.ops.matrices import Matrices, MatrixForm, Tensors

from .launch import TRITON_DTYPES, Table, on_device_of, splits_to_fill, to_device_of

_FIELDS = tl.constexpr(9)

COLUMNS = 64
TOKENS = 16
#: Tokens that each part of a unit has about.
_PART = 256


@triton.jit(do_not_specialize=["problems", "units", "splits"])
def affine_kernel(
    p_table, p_offsets, p_out, problems, units, splits, n,
    GRADIENT: tl.constexpr, X: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr,
    b_t: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    unit = (tl.program_id(0) % units).to(tl.int64)
    p_row = p_table + (tl.program_id(0) // units).to(tl.int64) * _FIELDS
    p_gradient = tl.load(p_row).to(tl.pointer_type(GRADIENT))
    p_x = tl.load(p_row + 1).to(tl.pointer_type(X))
    p_mean = tl.load(p_row + 2).to(tl.pointer_type(tl.float32))
    p_rstd = tl.load(p_row + 3).to(tl.pointer_type(tl.float32))
    stride_gt = tl.load(p_row + 4)
    stride_gn = tl.load(p_row + 5)
    stride_xt = tl.load(p_row + 6)
    stride_xn = tl.load(p_row + 7)
    problem = tl.load(p_row + 8)
    # What the launcher knows of all, said so that Triton believes it: wide loads depend on it.
    if CONTIGUOUS:
        stride_gn = 1
        stride_xn = 1
    if ALIGNED:
        p_gradient = tl.multiple_of(p_gradient, 16)
        p_x = tl.multiple_of(p_x, 16)
        stride_gt = stride_gt // 8 * 8
        stride_xt = stride_xt // 8 * 8
    split = tl.program_id(2)
    o_n = tl.program_id(1) * b_n + tl.arange(0, b_n)
    m_n = o_n < n
    start = tl.load(p_offsets + unit)
    length = tl.load(p_offsets + unit + 1) - start
    first = start + length * split // splits
    last = start + length * (split + 1) // splits
    weight = tl.zeros((b_t, b_n), tl.float32)
    bias = tl.zeros((b_t, b_n), tl.float32)
    for token in range(first, last, b_t):
        o_t = token + tl.arange(0, b_t)
        m_t = o_t < last
        m_tile = m_t[:, None] & m_n[None, :]
        # [b_t, b_n]
        g = tl.load(
            p_gradient + o_t[:, None] * stride_gt + o_n[None, :].to(tl.int64) * stride_gn, mask=m_tile, other=0.0
        )
        # [b_t, b_n]
        x = tl.load(p_x + o_t[:, None] * stride_xt + o_n[None, :].to(tl.int64) * stride_xn, mask=m_tile, other=0.0)
        # [b_t]
        mean = tl.load(p_mean + o_t, mask=m_t, other=0.0).to(tl.float32)
        rstd = tl.load(p_rstd + o_t, mask=m_t, other=0.0).to(tl.float32)
        g = g.to(tl.float32)
        weight += tl.where(m_tile, g * ((x.to(tl.float32) - mean[:, None]) * rstd[:, None]), 0.0)
        bias += g
    p_sums = p_out + ((split * problems + problem) * 2 * units + unit) * n + o_n
    # [b_n]
    tl.store(p_sums, tl.sum(weight, 0), mask=m_n)
    tl.store(p_sums + units.to(tl.int64) * n, tl.sum(bias, 0), mask=m_n)


class _Launch(NamedTuple):
    """Norms whose gradients and inputs have the same dtypes."""

    gradient: torch.dtype
    x: torch.dtype
    contiguous: bool
    aligned: bool
    members: list[int]
    table: Table


@functools.lru_cache(maxsize=128)
def _launches(gradients: MatrixForm, xs: MatrixForm, wide_gradients: bytes, wide_xs: bytes) -> list[_Launch]:
    kinds: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for i, kind in enumerate(zip(gradients.dtypes, xs.dtypes)):
        kinds.setdefault(kind, []).append(i)
    found = []
    for kind, members in kinds.items():
        lines = [(0, 0, 0, 0, *gradients.strides[i], *xs.strides[i], i) for i in members]
        places = [([number * _FIELDS.value + at for number in range(len(members))], members) for at in range(4)]
        contiguous = all(form.strides[i][1] == 1 for i in members for form in (gradients, xs))
        aligned = all(wide_gradients[i] and wide_xs[i] for i in members)
        found.append(_Launch(*kind, contiguous, aligned, members, Table(lines, *places)))
    return found


def affine_sums_group(
    gradients: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    means: Sequence[torch.Tensor],
    rstds: Sequence[torch.Tensor],
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Float32 [k, 2, B, n] of k layer norms: of each the weight's, then the bias's.

    gradients and xs [N, n], float32, bfloat16 or float16, any strides; means and rstds of N entries, float32, and copied once
    where they are not contiguous.
    """
    units, (tokens, n) = offsets.shape[0] - 1, xs[0].shape
    like, columns = xs[0], -(-n // COLUMNS)
    splits = splits_to_fill(like, len(xs) * units * columns, max(1, tokens // max(1, units) // _PART))
    sums = torch.empty(splits, len(xs), 2, units, n, dtype=torch.float32, device=like.device)
    if sums.numel():
        gradients, xs = Matrices.of(gradients), Matrices.of(xs)
        rows = [Tensors(row.float().contiguous() for row in rows) for rows in (means, rstds)]
        addresses = [own.addresses for own in (gradients, xs, *rows)]
        offsets = to_device_of(offsets, like)
        for launch in _launches(gradients.form, xs.form, gradients.wide, xs.wide):
            with on_device_of(like):
                affine_kernel[(len(launch.members) * units, columns, splits)](
                    launch.table.on_device_of(like, *addresses), offsets, sums, len(xs), units, splits, n,
                    GRADIENT=TRITON_DTYPES[launch.gradient], X=TRITON_DTYPES[launch.x],
                    CONTIGUOUS=launch.contiguous, ALIGNED=launch.aligned, b_t=TOKENS, b_n=COLUMNS, num_warps=4,
                )  # fmt: skip
    return sums[0] if splits == 1 else sums.sum(0)
