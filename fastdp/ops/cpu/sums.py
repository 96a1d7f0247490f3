"""Sums on processors: torch's own matrix products, on factors read in place wherever their dtype and layout allow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import fastdp._native as _native

from ..factors import (
    ELEMENT,
    in_full_precision,
    is_one_hot,
    native_factor,
    per_token,
    unit_bounds,
)
from ..stream import native_threads
from .norms import has_kernel, kept_norms

# Tokens multiplied at a time: the scaled copy of the narrower factor is used again from the cache, and products this deep
# lose nothing by reading and writing the sum once more.
_SLAB = 256
# Products of at most this many columns are taken transposed: with 512 rows and 8 columns MKL is then four times faster.
_NARROW = 32
_SHORTEST_RUN = 64  # tokens: a product over fewer costs more in reading and writing `out` than copying them together


def per_unit(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """:func:`fastdp.ops.per_unit` on a processor."""
    return kept_norms(left, right, unit_bounds(offsets))[0] if has_kernel(left, right) else NotImplemented


def per_unit_group(lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor) -> tuple[list[Tensor], Tensor]:
    """:func:`fastdp.ops.per_unit_group` on a processor: one matrix after another."""
    if not has_kernel(*lefts, *rights):
        return NotImplemented
    bounds = unit_bounds(offsets)
    gradients, squares = zip(*[kept_norms(left, right, bounds) for left, right in zip(lefts, rights)])
    return list(gradients), torch.stack(squares)


def column_sums(left: Tensor, offsets: Tensor) -> Tensor:
    """:func:`fastdp.ops.column_sums` on a processor: the gradients of a matrix whose inputs are ones."""
    if not has_kernel(left):
        return NotImplemented
    return kept_norms(left.new_ones(1).expand(left.shape[0], 1), left, unit_bounds(offsets))[0][:, 0]


def affine_sums_group(
    gradients: Sequence[Tensor], xs: Sequence[Tensor], means: Sequence[Tensor], rstds: Sequence[Tensor], offsets: Tensor
) -> Tensor:
    """:func:`fastdp.ops.affine_sums_group` on a processor: one after another."""
    if not has_kernel(*gradients, *xs) or {row.dtype for row in (*means, *rstds)} != {torch.float32}:
        return NotImplemented
    bounds, threads = unit_bounds(offsets), native_threads()
    sums = torch.empty(len(xs), 2, len(bounds) - 1, xs[0].shape[1])
    for out, gradient, x, mean, rstd in zip(sums, gradients, xs, means, rstds):
        rows = mean.contiguous(), rstd.contiguous()
        _native.affine_sums(native_factor(gradient), native_factor(x), *rows, bounds, out, threads)
    return sums


def kept_runs(weights: Tensor) -> list[tuple[int, int]]:
    """Runs of tokens, or of units, whose weight is not 0."""
    if int(torch.count_nonzero(weights)) == weights.shape[0]:
        return [(0, weights.shape[0])]
    zero = (weights == 0).to(torch.int8)
    edges = torch.diff(zero, prepend=zero.new_ones(1), append=zero.new_ones(1)).nonzero()[:, 0].tolist()
    return list(zip(edges[::2], edges[1::2]))


def _add_products(out: Tensor, left: Tensor, right: Tensor, weights: Tensor, begun: bool) -> None:
    """Add the weighted sum of tokens that are all kept: the narrower factor is scaled, the wider one read in place.

    A sum that is not ``begun`` is written, whatever its memory holds.
    """
    weights = weights.unsqueeze(1)
    narrow = left if out.shape[0] < out.shape[1] else right
    scaled = out.new_empty(min(_SLAB, left.shape[0]), narrow.shape[1])
    for start in range(0, left.shape[0], _SLAB):
        tokens = slice(start, start + _SLAB)
        part = narrow[tokens]
        part = torch.mul(part, weights[tokens], out=scaled[: part.shape[0]])
        held = int(begun or start > 0)
        if narrow is left:
            torch.addmm(out, part.T, right[tokens].to(out.dtype), beta=held, out=out)
        elif out.shape[1] <= _NARROW:
            product = torch.mm(part.T, left[tokens].to(out.dtype)).T
            out.add_(product) if held else out.copy_(product)
        else:
            torch.addmm(out, left[tokens].to(out.dtype).T, part, beta=held, out=out)


@in_full_precision
def weighted_sum_(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    weights: Tensor,
    weights_unmasked: Tensor | None,
    mask: Tensor | None,
    offsets: Tensor | None,
) -> None:
    """The sums of :mod:`fastdp.ops.sums` into ``out`` on a processor; some, as NotImplemented says, are for torch."""
    one_hot, tokens = is_one_hot(left), right.shape[0]
    if mask is not None and weights_unmasked is not None:
        if not (_native_rows(out) and has_kernel(left, right)):
            return NotImplemented
        weights, others = per_token(weights, offsets, tokens), per_token(weights_unmasked, offsets, tokens)
        return (_onehot_masked if one_hot else _masked)(out, left, right, weights, others, mask)
    if one_hot and not (_native_rows(out) and right.dtype in ELEMENT and weights.dtype == torch.float32):
        return NotImplemented
    weights = per_token(weights, offsets, tokens)
    if one_hot:
        return _onehot(out, left, right, weights)
    return _add_kept(out, left, right, weights, kept_runs(weights), True)


def _add_kept(
    out: Tensor, left: Tensor, right: Tensor, weights: Tensor, runs: list[tuple[int, int]], begun: bool
) -> None:
    """Add the weighted sum of the tokens of these runs; one that is not ``begun`` is written."""
    if len(runs) * _SHORTEST_RUN > right.shape[0] and len(runs) > 1:
        kept = weights.nonzero()[:, 0]
        left, right, weights = left.index_select(0, kept), right.index_select(0, kept), weights[kept]
        runs = [(0, right.shape[0])]
    for start, end in runs:
        if end > start:
            _add_products(out, left[start:end], right[start:end], weights[start:end], begun)
            begun = True
    if not begun:
        out.zero_()


@in_full_precision
def weighted_sum_group_(
    outs: Sequence[Tensor],
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    weights: Tensor,
    offsets: Tensor,
    begun: Sequence[bool],
) -> None:
    """:func:`fastdp.ops.weighted_sum_group` on a processor: a matrix after another."""
    lengths, everywhere = np.diff(offsets.numpy()), bool(weights.all())
    for out, left, right, held, own in zip(
        outs, lefts, rights, begun, weights.detach().numpy().repeat(lengths, axis=1)
    ):
        spread = torch.from_numpy(own)
        if everywhere and len(own):
            _add_products(out, left, right, spread, held)
        else:
            _add_kept(out, left, right, spread, kept_runs(spread), held)


def _native_rows(out: Tensor) -> bool:
    return out.dtype == torch.float32 and out.stride(1) == 1


def _onehot(out: Tensor, ids: Tensor, right: Tensor, weights: Tensor) -> None:
    factor, weights, threads = native_factor(right), weights.contiguous(), native_threads()
    _native.onehot_add(ids, ids.stride(0), factor, right.shape[0], weights, out, out.stride(0), threads)


def _onehot_masked(out: Tensor, ids: Tensor, right: Tensor, masked: Tensor, unmasked: Tensor, mask: Tensor) -> None:
    given = ids, ids.stride(0), native_factor(right), right.shape[0]
    weights = masked.float().contiguous(), unmasked.float().contiguous()
    _native.onehot_masked_add(*given, *weights, mask.contiguous(), out, out.stride(0), native_threads())


def _runs(*weights: Tensor) -> list[int]:
    """Bounds of the runs of tokens over which every one of these weights stays the same."""
    if weights[0].shape[0] == 0:
        return [0]
    change = weights[0][1:] != weights[0][:-1]
    for other in weights[1:]:
        change |= other[1:] != other[:-1]
    return [0, *(change.nonzero()[:, 0] + 1).tolist(), weights[0].shape[0]]


def _masked(out: Tensor, left: Tensor, right: Tensor, masked: Tensor, unmasked: Tensor, mask: Tensor) -> None:
    bounds = _runs(masked, unmasked)
    if len(bounds) - 1 > right.shape[0] // 8:
        return NotImplemented
    first = torch.tensor(bounds[:-1], dtype=torch.int64)
    given = native_factor(left), native_factor(right), bounds, masked[first].tolist(), unmasked[first].tolist()
    _native.masked_weighted_sum(*given, mask.contiguous(), out, out.stride(0), native_threads())
