"""Sums of token gradients: one gradient a unit, or one weighted sum over all tokens."""

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
    check_left,
    check_mask,
    check_offsets,
    check_pair,
    check_weights,
    has_kernel,
    in_full_precision,
    is_one_hot,
    native_factor,
    per_token,
    unit_bounds,
)
from .matrices import Matrices
from .norms import kept_norms
from .stream import native_threads
from .table import Op, check_tensors


def _per_unit_reference(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    bounds = unit_bounds(offsets)
    gradients = torch.zeros_like(_per_unit_fake(left, right, offsets))
    for gradient, start, end in zip(gradients, bounds, bounds[1:]):
        gradient += left[start:end].to(gradient.dtype).T @ right[start:end].to(gradient.dtype)
    return gradients


def _per_unit_fake(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    return right.new_empty(offsets.shape[0] - 1, left.shape[1], right.shape[1], dtype=accumulator(left, right))


def _check_per_unit(left: Tensor, right: Tensor, offsets: Tensor) -> None:
    check_pair(left, right)
    if is_one_hot(left):
        raise ValueError("left is a vector of ids: the gradients of a table are not instantiated, use sqnorm")
    check_offsets(offsets, right.shape[0])


PER_UNIT = Op(
    "per_unit(Tensor left, Tensor right, Tensor offsets) -> Tensor",
    reference=_per_unit_reference,
    fake=_per_unit_fake,
    check=_check_per_unit,
)
PER_UNIT.in_family("sums")


def per_unit(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of each unit, instantiated: for matrices smaller than their factors (LoRA).

    Args:
        left: [N, m], float, any strides.
        right: [N, n], float, any strides.
        offsets: int64 [B + 1], from 0 to N, not decreasing; on the CPU or with the factors.

    Returns:
        [B, m, n], float32 (float64 if a factor is float64); zero for empty units.

    Raises:
        TypeError, ValueError: a dtype, shape, device or offset outside the above.

    >>> import torch
    >>> from fastdp.ops import per_unit
    >>> left, right = torch.ones(3, 2), torch.ones(3, 4)  # three tokens
    >>> offsets = torch.tensor([0, 1, 3])  # one of the first unit, two of the second
    >>> per_unit(left, right, offsets).shape
    torch.Size([2, 2, 4])
    >>> per_unit(left, right, offsets)[:, 0, 0]
    tensor([1., 2.])
    """
    return PER_UNIT(left, right, offsets)


def _per_unit_group_reference(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor
) -> tuple[list[Tensor], Tensor]:
    gradients = [_per_unit_reference(left, right, offsets) for left, right in zip(lefts, rights)]
    dtype = accumulator(*lefts, *rights)
    return gradients, torch.stack(
        [gradient.square().sum((1, 2), dtype=torch.float64).to(dtype) for gradient in gradients]
    )


def _per_unit_group_fake(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor
) -> tuple[list[Tensor], Tensor]:
    gradients = [_per_unit_fake(left, right, offsets) for left, right in zip(lefts, rights)]
    return gradients, rights[0].new_empty(len(lefts), offsets.shape[0] - 1, dtype=accumulator(*lefts, *rights))


def _check_per_unit_group(lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor) -> None:
    check_group(Matrices.of(lefts), Matrices.of(rights), offsets)


PER_UNIT_GROUP = Op(
    "per_unit_group(Tensor[] lefts, Tensor[] rights, Tensor offsets) -> (Tensor[], Tensor)",
    reference=_per_unit_group_reference,
    fake=_per_unit_group_fake,
    check=_check_per_unit_group,
)
PER_UNIT_GROUP.in_family("sums")


def per_unit_group(lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor) -> tuple[list[Tensor], Tensor]:
    """Gradients of each unit for k matrices over the same tokens, and their squared norms: the adapters of a LoRA step.

    On a GPU one launch makes them all; on a processor they are made one after another.

    Args:
        lefts: k matrices [N, m_i], float, any strides.
        rights: k matrices [N, n_i], float, any strides.
        offsets: int64 [B + 1], from 0 to N, not decreasing; on the CPU or with the factors.

    Returns:
        k gradients [B, m_i, n_i], float32 (float64 if one of the two factors is float64), zero for empty units; and
        their squared norms [k, B], float32 (float64 if any factor is float64).

    Raises:
        TypeError, ValueError: no matrices, lists of two lengths, ids, other tokens, or what :func:`per_unit` refuses.

    >>> import torch
    >>> from fastdp.ops import per_unit_group
    >>> left, right = torch.ones(3, 2), torch.ones(3, 4)  # three tokens
    >>> offsets = torch.tensor([0, 1, 3])  # one of the first unit, two of the second
    >>> gradients, norms = per_unit_group([left, 2 * left], [right, right], offsets)
    >>> norms
    tensor([[  8.,  32.],
            [ 32., 128.]])
    """
    return PER_UNIT_GROUP(Matrices.of(lefts), Matrices.of(rights), offsets)


def column_sums(left: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each unit's rows: the per-unit gradients [B, m] of a bias.

    Args:
        left: [N, m], float, any strides.
        offsets: int64 [B + 1], from 0 to N, not decreasing.

    Returns:
        [B, m], float32 (float64 if ``left`` is float64); zero for empty units.

    Raises:
        TypeError, ValueError: a dtype, shape, device or offset outside the above.

    >>> import torch
    >>> from fastdp.ops import column_sums
    >>> column_sums(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 3]))
    tensor([[1.],
            [5.]])
    """
    check_left(left)
    if is_one_hot(left):
        raise ValueError("left is a vector of ids: column sums are of a matrix [tokens, m]")
    # The gradients of a matrix whose inputs are ones.
    return per_unit(left.new_ones(1).expand(left.shape[0], 1), left, offsets)[:, 0]


def _affine_sums_group_reference(
    gradients: Sequence[Tensor], xs: Sequence[Tensor], means: Sequence[Tensor], rstds: Sequence[Tensor], offsets: Tensor
) -> Tensor:
    bounds, dtype = unit_bounds(offsets), accumulator(*gradients, *xs)
    sums = gradients[0].new_zeros(len(xs), 2, len(bounds) - 1, xs[0].shape[1], dtype=dtype)
    for number, (gradient, x, *rows) in enumerate(zip(gradients, xs, means, rstds)):
        mean, rstd = (row.to(dtype).reshape(-1, 1) for row in rows)
        for unit, (start, end) in enumerate(zip(bounds, bounds[1:])):
            own = slice(start, end)
            arrived = gradient[own].to(dtype)
            sums[number, 0, unit] = ((x[own].to(dtype) - mean[own]) * rstd[own] * arrived).sum(0)
            sums[number, 1, unit] = arrived.sum(0)
    return sums


def _check_affine_sums_group(
    gradients: Sequence[Tensor], xs: Sequence[Tensor], means: Sequence[Tensor], rstds: Sequence[Tensor], offsets: Tensor
) -> None:
    if not xs or not len(gradients) == len(xs) == len(means) == len(rstds):
        raise ValueError(
            f"there are {len(gradients)} gradients, {len(xs)} xs, {len(means)} means and {len(rstds)} rstds: give as many of "
            "each, at least one"
        )
    x, tokens = xs[0], xs[0].shape[0]
    for gradient, own in zip(gradients, xs):
        check_pair(gradient, own, ("gradient", "x"))
        if gradient.dim() != 2 or not gradient.shape == own.shape == x.shape:
            shapes = tuple(gradient.shape), tuple(own.shape)
            raise ValueError(
                f"gradient has shape {shapes[0]} and x {shapes[1]}: both are [tokens, n], and all are alike"
            )
    for name, rows in (("mean", means), ("rstd", rstds)):
        for row in rows:
            if row.numel() != tokens or not row.is_floating_point():
                raise ValueError(f"{name} is {row.dtype} {list(row.shape)}: one float a token")
    check_offsets(offsets, tokens)


AFFINE_SUMS_GROUP = Op(
    "affine_sums_group(Tensor[] gradients, Tensor[] xs, Tensor[] means, Tensor[] rstds, Tensor offsets) -> Tensor",
    reference=_affine_sums_group_reference,
    fake=lambda gradients, xs, means, rstds, offsets: xs[0].new_empty(
        len(xs), 2, offsets.shape[0] - 1, xs[0].shape[1], dtype=accumulator(*gradients, *xs)
    ),
    check=_check_affine_sums_group,
)
AFFINE_SUMS_GROUP.in_family("sums")


def affine_sums(gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The per-unit gradients of a layer norm's weight and bias, in one reading of both arguments.

    Args:
        gradient: [N, n], of the layer's output, float, any strides.
        x: [N, n], its input, float, any strides.
        mean, rstd: [N], of each row of ``x``, and the inverse of its standard deviation.
        offsets: int64 [B + 1], from 0 to N, not decreasing; on the CPU or with ``x``.

    Returns:
        Sums [B, n] of ``gradient (x - mean) rstd`` and of ``gradient`` over each unit's tokens, float32 (float64 if an
        argument is float64); zero for empty units.

    Raises:
        TypeError, ValueError: a dtype, shape, device or offset outside the above.

    >>> import torch
    >>> from fastdp.ops import affine_sums
    >>> gradient, x, offsets = torch.ones(3, 2), torch.tensor([[1.0, 3.0]] * 3), torch.tensor([0, 1, 3])
    >>> weight, bias = affine_sums(gradient, x, x.mean(1), 1 / x.std(1, correction=0), offsets)
    >>> weight, bias
    (tensor([[-1.,  1.],
            [-2.,  2.]]), tensor([[1., 1.],
            [2., 2.]]))
    """
    return AFFINE_SUMS_GROUP([gradient], [x], [mean], [rstd], offsets)[0].unbind(0)


def affine_sums_group(
    gradients: Sequence[Tensor], xs: Sequence[Tensor], means: Sequence[Tensor], rstds: Sequence[Tensor], offsets: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """:func:`affine_sums` of k layer norms of one shape: on a GPU one launch for all of the same dtypes.

    Args:
        gradients, xs: k matrices each, all [N, n], float, any strides.
        means, rstds: k each, of N entries.
        offsets: int64 [B + 1], from 0 to N, not decreasing; on the CPU or with ``xs``.

    Returns:
        k pairs of sums [B, n], float32 (float64 if an argument is float64).

    Raises:
        TypeError, ValueError: lists of other lengths, or of several shapes, or what :func:`affine_sums` refuses.

    >>> import torch
    >>> from fastdp.ops import affine_sums_group
    >>> gradient, x, offsets = torch.ones(3, 2), torch.tensor([[1.0, 3.0]] * 3), torch.tensor([0, 1, 3])
    >>> both = [[one] * 2 for one in (gradient, x, x.mean(1), 1 / x.std(1, correction=0))]
    >>> [bias.tolist() for _, bias in affine_sums_group(*both, offsets)]
    [[[1.0, 1.0], [2.0, 2.0]], [[1.0, 1.0], [2.0, 2.0]]]
    """
    sums = AFFINE_SUMS_GROUP(Matrices.of(gradients), Matrices.of(xs), list(means), list(rstds), offsets)
    rows = sums.flatten(0, 1).unbind(0)
    return [*zip(rows[::2], rows[1::2])]


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
    check_group(Matrices.of(lefts), Matrices.of(rights), offsets)
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
    """:func:`weighted_sum` of k matrices over the same tokens: on a GPU in one launch.

    Args:
        lefts: k matrices [N, m_i], float, any strides.
        rights: k matrices [N, n_i], float, any strides.
        weights: [k, B], float32 or float64, one a matrix and unit.
        offsets: int64 [B + 1], from 0 to N, not decreasing; on the CPU or with the factors.
        outs: [m_i, n_i], float32 or float64: sums are added to these, in place; None where there is none yet.

    Returns:
        k matrices: those of ``outs``, and new ones, float32 (float64 if a factor is float64).

    Raises:
        TypeError, ValueError: no matrices, lists of other lengths, ids, other tokens, or what :func:`weighted_sum` refuses.

    >>> import torch
    >>> from fastdp.ops import weighted_sum_group
    >>> left, right = torch.ones(3, 2), torch.ones(3, 4)  # three tokens
    >>> offsets = torch.tensor([0, 1, 3])  # one of the first unit, two of the second
    >>> sums = weighted_sum_group([left, 2 * left], [right, right], torch.tensor([[1.0, 0.5], [1.0, 0.0]]), offsets)
    >>> [float(total[0, 0]) for total in sums]
    [2.0, 2.0]
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

    >>> import torch
    >>> from fastdp.ops import weighted_sum
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
    """Sum of all tokens' gradients, with one weight for masked and another for unmasked entries (Rap-FT's two blocks).

    A token whose weight is 0 for an entry is left out of it by selection, as in :func:`weighted_sum`.

    Args:
        left: [N, m], float, any strides; or int64 ids [N] of rows of a table, the mask's.
        right: [N, n], float, any strides.
        weights_masked: [N], float32 or float64: weights where ``mask`` is True; with ``offsets`` [B], one a unit.
        weights_unmasked: [N] or [B] likewise: weights where it is False.
        mask: bool [m, n].
        out: [m, n], float32 or float64: the sum is added to it, in place.
        offsets: int64 [B + 1], as in :func:`weighted_sum`.

    Returns:
        ``out``, or a new [m, n] matrix, float32 (float64 if a factor is float64).

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit.

    >>> import torch
    >>> from fastdp.ops import masked_weighted_sum
    >>> left, right = torch.ones(3, 2), torch.ones(3, 4)  # three tokens
    >>> offsets = torch.tensor([0, 1, 3])  # one of the first unit, two of the second
    >>> mask = torch.tensor([[True], [False]]).expand(2, 4).contiguous()
    >>> masked_weighted_sum(left, right, torch.ones(2), torch.zeros(2), mask, offsets=offsets)
    tensor([[3., 3., 3., 3.],
            [0., 0., 0., 0.]])
    """
    check_tensors(left=left, right=right, mask=mask)
    if out is None:
        out = right.new_zeros(mask.shape, dtype=accumulator(left, right))
    WEIGHTED_SUM(out, left, right, weights_masked, weights_unmasked, mask, offsets)
    return out


# On processors: torch's own matrix products, on factors read in place wherever their dtype and layout allow.

# Tokens multiplied at a time: the scaled copy of the narrower factor is used again from the cache, and products this deep
# lose nothing by reading and writing the sum once more.
_SLAB = 256
_SHORTEST_RUN = 64  # tokens: a product over fewer costs more in reading and writing `out` than copying them together


@PER_UNIT.on_cpu
def _per_unit_on_cpu(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """:func:`fastdp.ops.per_unit` on a processor."""
    return kept_norms(left, right, unit_bounds(offsets))[0] if has_kernel(left, right) else NotImplemented


@PER_UNIT_GROUP.on_cpu
def _per_unit_group_on_cpu(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor
) -> tuple[list[Tensor], Tensor]:
    """:func:`fastdp.ops.per_unit_group` on a processor: one matrix after another."""
    if not has_kernel(*lefts, *rights):
        return NotImplemented
    bounds = unit_bounds(offsets)
    gradients, squares = zip(*[kept_norms(left, right, bounds) for left, right in zip(lefts, rights)])
    return list(gradients), torch.stack(squares)


@AFFINE_SUMS_GROUP.on_cpu
def _affine_sums_group_on_cpu(
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
    scaled = out.new_empty(min(_SLAB, left.shape[0]), min(left.shape[1], right.shape[1]))
    if left.shape[0] == len(scaled):
        # Each slice takes the host as long as a small product.
        _add_slab(out, left, right, weights, scaled, begun)
        return
    for start in range(0, left.shape[0], _SLAB):
        tokens = slice(start, start + _SLAB)
        part = right[tokens]
        _add_slab(out, left[tokens], part, weights[tokens], scaled[: len(part)], begun or start > 0)


def _add_slab(out: Tensor, left: Tensor, right: Tensor, weights: Tensor, scaled: Tensor, begun: bool) -> None:
    """Add the weighted sum of a few tokens, by way of the memory ``scaled``; one that is not ``begun`` is written."""
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
    """The sums of :mod:`fastdp.ops.sums` into ``out`` on a processor; some, as NotImplemented says, are for torch."""
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
        ids, row, factor = left, left.stride(0), native_factor(right)
        if mask is not None and masked:
            place = mask.contiguous(), out, out.stride(0), threads
            _native.onehot_masked_add(ids, row, factor, tokens, each[0], each[1], *place)
        else:
            _native.onehot_add(ids, row, factor, tokens, each[0], out, out.stride(0), threads)
        return None
    # Of short units torch's products are faster.
    if mask is None or weights_unmasked is None or offsets is None or len(weights) > tokens // 8:
        return NotImplemented
    factors = native_factor(left), native_factor(right)
    runs = unit_bounds(offsets), weights.tolist(), weights_unmasked.tolist()
    _native.masked_weighted_sum(*factors, *runs, mask.contiguous(), out, out.stride(0), threads)
    return None


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
