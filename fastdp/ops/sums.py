"""Weighted sums of all tokens' gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import fastdp._native as _native

from .factors import (
    ELEMENT,
    FEW_COLUMNS,
    SUMS,
    accumulator,
    check_group,
    check_ids,
    check_mask,
    check_offsets,
    check_pair,
    check_weights,
    has_kernel,
    in_full_precision,
    is_one_hot,
    native_factor,
    native_factors,
    per_token,
    unit_bounds,
    unit_lengths,
)
from .matrices import Matrices
from .routes import NARROW
from .stream import native_threads
from .table import Op, check_tensors


def _add_weighted(out: Tensor, left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    keep = weights != 0
    left, scaled = left[keep], right[keep].to(out.dtype) * weights[keep].to(out.dtype).unsqueeze(1)
    if is_one_hot(left):
        return out.index_add_(0, left, scaled)
    return torch.addmm(out, left.to(out.dtype).T, scaled, out=out)


def _weighted_sum_reference(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    weights: Tensor,
    weights_unmasked: Tensor | None,
    mask: Tensor | None,
    offsets: Tensor | None,
) -> None:
    weights = per_token(weights, offsets, right.shape[0])
    if mask is None or weights_unmasked is None:
        _add_weighted(out, left, right, weights)
        return
    others = per_token(weights_unmasked, offsets, right.shape[0])
    masked, unmasked = (_add_weighted(torch.zeros_like(out), left, right, w) for w in (weights, others))
    out.add_(torch.where(mask, masked, unmasked))


def _check_weighted_sum(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    weights: Tensor,
    weights_unmasked: Tensor | None,
    mask: Tensor | None,
    offsets: Tensor | None,
) -> None:
    check_pair(left, right)
    each, count = "token", right.shape[0]
    if offsets is not None:
        check_offsets(offsets, right.shape[0])
        each, count = "unit", offsets.shape[0] - 1
    if mask is None or weights_unmasked is None:
        check_weights(weights, right, each, count=count)
    else:
        check_weights(weights, right, each, "weights_masked", count=count)
        check_weights(weights_unmasked, right, each, "weights_unmasked", count=count)
        check_mask(mask, left, right)
    _check_out(out, left, right)
    if is_one_hot(left):
        check_ids(left, out.shape[0])


def _check_out(out: Tensor, left: Tensor, right: Tensor) -> None:
    if out.dtype not in SUMS:
        raise TypeError(f"out is {out.dtype}: sums are kept in float32 or float64")
    m = out.shape[0] if is_one_hot(left) and out.dim() == 2 else left.shape[-1]
    if out.shape != (m, right.shape[1]):
        raise ValueError(f"out has shape {tuple(out.shape)}: the sum has shape {(m, right.shape[1])}")


WEIGHTED_SUM = Op(
    "weighted_sum_(Tensor(a!) out, Tensor left, Tensor right, Tensor weights, Tensor? weights_unmasked, Tensor? mask, "
    "Tensor? offsets) -> ()",
    reference=_weighted_sum_reference,
    fake=lambda out, left, right, weights, weights_unmasked, mask, offsets: None,
    check=_check_weighted_sum,
)
WEIGHTED_SUM.in_family("sums")


def _weighted_sum_group_reference(
    outs: Sequence[Tensor],
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    weights: Tensor,
    offsets: Tensor,
    begun: Sequence[bool],
) -> None:
    for out, left, right, own, held in zip(outs, lefts, rights, weights, begun):
        if not held:
            out.zero_()
        _weighted_sum_reference(out, left, right, own, None, None, offsets)


def _check_weighted_sum_group(
    outs: Sequence[Tensor],
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    weights: Tensor,
    offsets: Tensor,
    begun: Sequence[bool],
) -> None:
    check_group(lefts, rights, offsets)
    if not len(outs) == len(lefts) == len(weights) == len(begun):
        raise ValueError(f"there are {len(lefts)} lefts and {len(weights)} rows of weights: give as many of each")
    check_weights(weights[0], rights[0], "unit", count=offsets.shape[0] - 1)
    columns = Matrices.of(lefts).form.columns, Matrices.of(rights).form.columns
    if not {out.dtype for out in outs} <= {*SUMS} or Matrices.of(outs).shapes != [*zip(*columns)]:
        for out, left, right in zip(outs, lefts, rights):
            _check_out(out, left, right)


WEIGHTED_SUM_GROUP = Op(
    "weighted_sum_group_(Tensor(a!)[] outs, Tensor[] lefts, Tensor[] rights, Tensor weights, Tensor offsets, bool[] begun) "
    "-> ()",
    reference=_weighted_sum_group_reference,
    fake=lambda outs, lefts, rights, weights, offsets, begun: None,
    check=_check_weighted_sum_group,
)
WEIGHTED_SUM_GROUP.in_family("sums")


def weighted_sum_group(
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    weights: Tensor,
    offsets: Tensor,
    outs: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """`weighted_sum` of k pairs of matrices over the same tokens, by weights [k, B]: on a GPU in one launch.

    Sums are added to ``outs`` in place; None where there is none yet.
    """
    if not {torch.Tensor}.issuperset(map(type, (*lefts, *rights))):
        for left, right in zip(lefts, rights):
            check_tensors(left=left, right=right)
    lefts, rights = Matrices.of(lefts), Matrices.of(rights)
    given = [None] * len(lefts) if outs is None else outs
    wide = torch.float64 in [factor.dtype for factor in (*lefts, *rights)]
    dtypes = map(accumulator, lefts, rights) if wide else itertools.repeat(torch.float32)
    sums = Matrices(
        [
            right.new_empty(left.shape[-1], right.shape[-1], dtype=dtype) if out is None else out
            for out, left, right, dtype in zip(given, lefts, rights, dtypes)
        ]
    )
    WEIGHTED_SUM_GROUP(sums, lefts, rights, weights, offsets, [out is not None for out in given])
    return sums


def _empty_sum(left: Tensor, right: Tensor, rows: int | None) -> Tensor:
    """Zeros of the shape that a sum will have; other factors that have no sum are refused by the op."""
    if left.dim() == 0 or right.dim() == 0:
        check_pair(left, right)
    if is_one_hot(left):
        if rows is None or rows < 1:
            raise ValueError("left is a vector of ids: state the rows of the table, by `rows` or by `out`")
    elif rows is not None and rows != left.shape[-1]:
        raise ValueError(f"rows is {rows}, but left is {left.shape[-1]} wide")
    return right.new_zeros(rows or left.shape[-1], right.shape[-1], dtype=accumulator(left, right))


def weighted_sum(
    left: Tensor,
    right: Tensor,
    weights: Tensor,
    out: Tensor | None = None,
    rows: int | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Weighted sum of all tokens' gradients, ``sum over t of weights[t] left[t] right[t]^T``.

    A token of weight 0 is left out by selection: a NaN or infinity in its rows never reaches the sum. On a GPU a weight is
    applied once to what its unit adds, so say by ``offsets`` where units begin: otherwise runs of one weight are looked for.

    Args:
        left: [N, m] float, any strides, or int64 ids [N].
        right: [N, n], float, any strides.
        weights: [N], float32 or float64; with ``offsets`` [B], one a unit.
        out: [m, n], float32 or float64: the sum is added to it, in place.
        rows: the rows of the table, for ids without ``out``.
        offsets: int64 [B + 1], from 0 to N, not decreasing; on the CPU or with the factors.

    Returns:
        ``out``, or a new [m, n] matrix, float32 (float64 if a factor is float64).

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit, ids outside the table, ids without a table.

    >>> left, right = torch.ones(3, 2), torch.ones(3, 4)  # three tokens
    >>> offsets = torch.tensor([0, 1, 3])  # one of the first unit, two of the second
    >>> weighted_sum(left, right, torch.tensor([1.0, 0.5]), offsets=offsets)
    tensor([[2., 2., 2., 2.],
            [2., 2., 2., 2.]])
    """
    check_tensors(left=left, right=right)
    if out is None:
        out = _empty_sum(left, right, rows)
    WEIGHTED_SUM(out, left, right, weights, None, None, offsets)
    return out


def masked_weighted_sum(
    left: Tensor,
    right: Tensor,
    weights_masked: Tensor,
    weights_unmasked: Tensor,
    mask: Tensor,
    out: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """As `weighted_sum`, with one weight for entries where ``mask``, bool [m, n], is True and another for the others.

    These are Rap-FT's two blocks. A token whose weight is 0 for an entry is left out of it by selection.
    """
    check_tensors(left=left, right=right, mask=mask)
    if out is None:
        out = right.new_zeros(mask.shape, dtype=accumulator(left, right))
    WEIGHTED_SUM(out, left, right, weights_masked, weights_unmasked, mask, offsets)
    return out


# On CPUs: torch's own matrix products, on factors read in place where dtype and layout allow. A sum is `begun` once it holds
# something; until then the first product overwrites it, whatever its memory held.

# Tokens multiplied at a time: the scaled copy of the narrower factor is used again from the cache. Products this deep lose
# nothing by reading and writing the sum once more.
_SLAB = 256
_SHORTEST_RUN = 64  # tokens: a product over fewer costs more in reading and writing `out` than copying them together


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
    scaled = out.new_empty(min(_SLAB, left.shape[0]), min(left.shape[1], right.shape[1]))
    if left.shape[0] == len(scaled):
        # One slab: skip the slices, each of which costs as much host time as a small product.
        _add_slab(out, left, right, weights, scaled, begun)
        return
    for start in range(0, left.shape[0], _SLAB):
        tokens = slice(start, start + _SLAB)
        part = right[tokens]
        _add_slab(out, left[tokens], part, weights[tokens], scaled[: len(part)], begun or start > 0)


def _add_slab(out: Tensor, left: Tensor, right: Tensor, weights: Tensor, scaled: Tensor, begun: bool) -> None:
    """Add the weighted sum of at most `_SLAB` tokens, using ``scaled`` as scratch; a sum not ``begun`` is overwritten."""
    if out.shape[0] < out.shape[1]:
        torch.addmm(out, torch.mul(left, weights, out=scaled).T, right.to(out.dtype), beta=int(begun), out=out)
        return
    torch.mul(right, weights, out=scaled)
    if out.shape[1] <= FEW_COLUMNS:
        product = torch.mm(scaled.T, left.to(out.dtype)).T
        out.add_(product) if begun else out.copy_(product)
    else:
        torch.addmm(out, left.to(out.dtype).T, scaled, beta=int(begun), out=out)


@WEIGHTED_SUM.on_cpu
@in_full_precision
def _weighted_sum_on_cpu(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    weights: Tensor,
    weights_unmasked: Tensor | None,
    mask: Tensor | None,
    offsets: Tensor | None,
) -> None:
    """Add the weighted sum to ``out`` by products or C++; NotImplemented leaves the rest to the definition."""
    tokens, threads = right.shape[0], native_threads()
    if not is_one_hot(left) and (mask is None or weights_unmasked is None):
        each_token = per_token(weights, offsets, tokens)
        return _add_kept(out, left, right, each_token, kept_runs(each_token), True)
    if out.dtype != torch.float32 or out.stride(1) != 1 or right.dtype not in ELEMENT:
        return NotImplemented
    masked = mask is not None and weights_unmasked is not None
    if masked and not has_kernel(left):
        return NotImplemented
    if is_one_hot(left):
        each = [
            per_token(own, offsets, tokens).float().contiguous()
            for own in (weights, weights_unmasked)
            if own is not None
        ]
        others, chosen = (each[1], mask.contiguous()) if mask is not None and masked else (None, None)
        place = out, out.stride(0), threads
        _native.onehot_add(left, left.stride(0), native_factor(right), tokens, each[0], others, chosen, *place)
        return None
    # With fewer than 8 tokens a unit, torch's products are faster.
    if mask is None or weights_unmasked is None or offsets is None or len(weights) > tokens // 8:
        return NotImplemented
    factors = native_factor(left), native_factor(right)
    runs = unit_bounds(offsets), weights.tolist(), weights_unmasked.tolist()
    _native.masked_weighted_sum(*factors, *runs, mask.contiguous(), out, out.stride(0), threads)
    return None


def _add_kept(
    out: Tensor, left: Tensor, right: Tensor, weights: Tensor, runs: list[tuple[int, int]], begun: bool
) -> None:
    """Add the weighted sum of the tokens in ``runs``; a sum not ``begun`` is overwritten."""
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


@WEIGHTED_SUM_GROUP.on_cpu
@in_full_precision
def _weighted_sum_group_on_cpu(
    outs: Sequence[Tensor],
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    weights: Tensor,
    offsets: Tensor,
    begun: Sequence[bool],
) -> None:
    plain = weights.dtype is torch.float32 and has_kernel(*lefts, *rights)
    if plain and all(out.dtype is torch.float32 and out.is_contiguous() and min(out.shape) <= NARROW for out in outs):
        places, factors = [out.data_ptr() for out in outs], (native_factors(lefts), native_factors(rights))
        kept = weights.contiguous()
        _native.weighted_sum_group(*factors, unit_bounds(offsets), kept, places, list(begun), native_threads())
        return
    each = weights.detach().numpy()
    everywhere = np.count_nonzero(each) == each.size
    for out, left, right, held, own in zip(outs, lefts, rights, begun, each.repeat(unit_lengths(offsets), axis=1)):
        spread = torch.from_numpy(own)
        if everywhere and len(own):
            _add_products(out, left, right, spread, held)
        else:
            _add_kept(out, left, right, spread, kept_runs(spread), held)
