"""The gradients of units, instantiated: of matrices smaller than their factors, of biases, and of layer norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import fastdp._native as _native

from .factors import (
    accumulator,
    check_group,
    check_left,
    check_offsets,
    check_pair,
    has_kernel,
    is_one_hot,
    native_factor,
    unit_bounds,
)
from .matrices import Matrices
from .norms import kept_norms
from .stream import native_threads
from .table import Op


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


PER_UNIT_GROUP = Op(
    "per_unit_group(Tensor[] lefts, Tensor[] rights, Tensor offsets) -> (Tensor[], Tensor)",
    reference=_per_unit_group_reference,
    fake=_per_unit_group_fake,
    check=check_group,
)
PER_UNIT_GROUP.in_family("sums")


def per_unit_group(lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor) -> tuple[list[Tensor], Tensor]:
    """`per_unit` of k pairs of matrices over the same tokens, and the squared norms [k, B]: on a GPU in one launch."""
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
    """`affine_sums` of k layer norms of one shape: on a GPU one launch for all of the same dtypes."""
    sums = AFFINE_SUMS_GROUP(Matrices.of(gradients), Matrices.of(xs), list(means), list(rstds), offsets)
    rows = sums.flatten(0, 1).unbind(0)
    return [*zip(rows[::2], rows[1::2])]


# On processors: csrc/norms_direct.cpp and csrc/sums.cpp.


@PER_UNIT.on_cpu
def _per_unit_on_cpu(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    return kept_norms(left, right, unit_bounds(offsets))[0] if has_kernel(left, right) else NotImplemented


@PER_UNIT_GROUP.on_cpu
def _per_unit_group_on_cpu(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor
) -> tuple[list[Tensor], Tensor]:
    if not has_kernel(*lefts, *rights):
        return NotImplemented
    bounds = unit_bounds(offsets)
    gradients, squares = zip(*[kept_norms(left, right, bounds) for left, right in zip(lefts, rights)])
    return list(gradients), torch.stack(squares)


@AFFINE_SUMS_GROUP.on_cpu
def _affine_sums_group_on_cpu(
    gradients: Sequence[Tensor], xs: Sequence[Tensor], means: Sequence[Tensor], rstds: Sequence[Tensor], offsets: Tensor
) -> Tensor:
    if not has_kernel(*gradients, *xs) or {row.dtype for row in (*means, *rstds)} != {torch.float32}:
        return NotImplemented
    bounds, threads = unit_bounds(offsets), native_threads()
    sums = torch.empty(len(xs), 2, len(bounds) - 1, xs[0].shape[1])
    for out, gradient, x, mean, rstd in zip(sums, gradients, xs, means, rstds):
        rows = mean.contiguous(), rstd.contiguous()
        _native.affine_sums(native_factor(gradient), native_factor(x), *rows, bounds, out, threads)
    return sums
