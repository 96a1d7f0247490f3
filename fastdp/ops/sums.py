"""Sums of token gradients: one gradient a unit, or one weighted sum over all tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .factors import (
    accumulator,
    check_left,
    check_offsets,
    check_pair,
    in_full_precision,
    is_one_hot,
    unit_bounds,
    unit_gradient,
)
from .norms import check_ids, check_mask
from .table import Op


@in_full_precision
def _per_unit_reference(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    bounds = unit_bounds(offsets)
    if len(bounds) == 1:
        return _per_unit_fake(left, right, offsets)
    return torch.stack([unit_gradient(left, right, a, b) for a, b in zip(bounds, bounds[1:])])


def _per_unit_fake(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    return right.new_empty(offsets.shape[0] - 1, left.shape[1], right.shape[1], dtype=accumulator(left, right))


def _check_per_unit(left: Tensor, right: Tensor, offsets: Tensor) -> None:
    check_pair(left, right)
    if is_one_hot(left):
        raise ValueError("left is a vector of ids: the gradients of a table are not instantiated, use sqnorm")
    check_offsets(offsets, right.shape[0], right.device)


PER_UNIT = Op(
    "per_unit(Tensor left, Tensor right, Tensor offsets) -> Tensor",
    reference=_per_unit_reference,
    fake=_per_unit_fake,
    check=_check_per_unit,
)


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
    """
    return PER_UNIT(left, right, offsets)


@in_full_precision
def _per_unit_group_reference(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor
) -> tuple[list[Tensor], Tensor]:
    gradients = [_per_unit_reference(left, right, offsets) for left, right in zip(lefts, rights)]
    dtype = accumulator(*lefts, *rights)
    return gradients, torch.stack([gradient.to(dtype).square().sum((1, 2)) for gradient in gradients])


def _per_unit_group_fake(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor
) -> tuple[list[Tensor], Tensor]:
    gradients = [_per_unit_fake(left, right, offsets) for left, right in zip(lefts, rights)]
    return gradients, rights[0].new_empty(len(lefts), offsets.shape[0] - 1, dtype=accumulator(*lefts, *rights))


def _check_per_unit_group(lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor) -> None:
    if not lefts or len(lefts) != len(rights):
        raise ValueError(f"there are {len(lefts)} lefts and {len(rights)} rights: give as many of each, at least one")
    tokens, device = rights[0].shape[0], rights[0].device
    for number, (left, right) in enumerate(zip(lefts, rights)):
        check_pair(left, right, (f"lefts[{number}]", f"rights[{number}]"))
        if is_one_hot(left):
            raise ValueError(f"lefts[{number}] is a vector of ids: the gradients of a table are not instantiated")
        if right.shape[0] != tokens or right.device != device:
            raise ValueError(
                f"rights[{number}] has {right.shape[0]} tokens on {right.device} and rights[0] {tokens} on {device}: "
                "all of a group belong to the same tokens"
            )
    check_offsets(offsets, tokens, device)


PER_UNIT_GROUP = Op(
    "per_unit_group(Tensor[] lefts, Tensor[] rights, Tensor offsets) -> (Tensor[], Tensor)",
    reference=_per_unit_group_reference,
    fake=_per_unit_group_fake,
    check=_check_per_unit_group,
)


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
    """
    return PER_UNIT_GROUP(list(lefts), list(rights), offsets)


@in_full_precision
def _column_sums_reference(left: Tensor, offsets: Tensor) -> Tensor:
    bounds = unit_bounds(offsets)
    if len(bounds) == 1:
        return _column_sums_fake(left, offsets)
    return torch.stack([left[a:b].to(accumulator(left)).sum(0) for a, b in zip(bounds, bounds[1:])])


def _column_sums_fake(left: Tensor, offsets: Tensor) -> Tensor:
    return left.new_empty(offsets.shape[0] - 1, left.shape[1], dtype=accumulator(left))


def _check_column_sums(left: Tensor, offsets: Tensor) -> None:
    check_left(left)
    if is_one_hot(left):
        raise ValueError("left is a vector of ids: column sums are of a matrix [tokens, m]")
    check_offsets(offsets, left.shape[0], left.device)


COLUMN_SUMS = Op(
    "column_sums(Tensor left, Tensor offsets) -> Tensor",
    reference=_column_sums_reference,
    fake=_column_sums_fake,
    check=_check_column_sums,
)


def column_sums(left: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each unit's rows: the per-unit gradients [B, m] of a bias.

    Args:
        left: [N, m], float, any strides.
        offsets: int64 [B + 1], from 0 to N, not decreasing.

    Returns:
        [B, m], float32 (float64 if ``left`` is float64); zero for empty units.

    Raises:
        TypeError, ValueError: a dtype, shape, device or offset outside the above.
    """
    return COLUMN_SUMS(left, offsets)


def _selected(left: Tensor, right: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keep = weights != 0
    return left[keep], right[keep], weights[keep]


@in_full_precision
def _weighted_sum_inplace_reference(out: Tensor, left: Tensor, right: Tensor, weights: Tensor) -> None:
    left, right, weights = _selected(left, right, weights)
    scaled = right.to(out.dtype) * weights.to(out.dtype).unsqueeze(1)
    if is_one_hot(left):
        out.index_add_(0, left, scaled)
    else:
        torch.addmm(out, left.to(out.dtype).T, scaled, out=out)


def _weighted_sum_reference(left: Tensor, right: Tensor, weights: Tensor, rows: int | None) -> Tensor:
    out = torch.zeros_like(_weighted_sum_fake(left, right, weights, rows))
    _weighted_sum_inplace_reference(out, left, right, weights)
    return out


def _weighted_sum_fake(left: Tensor, right: Tensor, weights: Tensor, rows: int | None) -> Tensor:
    m = rows if rows is not None else left.shape[1]
    return right.new_empty(m, right.shape[1], dtype=accumulator(left, right))


def _check_weights(weights: Tensor, right: Tensor, name: str = "weights") -> None:
    """Raise TypeError or ValueError unless there is one float32 weight a token, beside the factors."""
    if weights.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} are {weights.dtype}: they must be float32 or float64")
    if weights.shape != right.shape[:1]:
        raise ValueError(f"{name} have shape {tuple(weights.shape)}: one a token is ({right.shape[0]},)")
    if weights.device != right.device:
        raise ValueError(f"{name} are on {weights.device} and the factors on {right.device}")


def check_unit_weights(weights: Tensor, instances: Tensor, name: str = "weights") -> None:
    """Raise TypeError or ValueError unless there is one float32 weight a unit, beside the instances."""
    if weights.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} are {weights.dtype}: they must be float32 or float64")
    if weights.shape != instances.shape[:1]:
        raise ValueError(f"{name} have shape {tuple(weights.shape)}: one a unit is ({instances.shape[0]},)")
    if weights.device != instances.device:
        raise ValueError(f"{name} are on {weights.device} and the instances on {instances.device}")


def _check_sum_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Raise TypeError or ValueError unless ``out`` can take the sum of these factors."""
    if out.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"out is {out.dtype}: sums are kept in float32 or float64")
    m = out.shape[0] if is_one_hot(left) and out.dim() == 2 else left.shape[-1]
    if out.shape != (m, right.shape[1]):
        raise ValueError(f"out has shape {tuple(out.shape)}: the sum has shape {(m, right.shape[1])}")
    if out.device != right.device:
        raise ValueError(f"out is on {out.device} and the factors on {right.device}")


def _check_weighted_sum_inplace(out: Tensor, left: Tensor, right: Tensor, weights: Tensor) -> None:
    check_pair(left, right)
    _check_weights(weights, right)
    _check_sum_into(out, left, right)
    if is_one_hot(left):
        check_ids(left, out.shape[0])


def _check_weighted_sum(left: Tensor, right: Tensor, weights: Tensor, rows: int | None) -> None:
    check_pair(left, right)
    _check_weights(weights, right)
    if is_one_hot(left):
        if rows is None or rows < 1:
            raise ValueError("left is a vector of ids: state the rows of the table, by `rows` or by `out`")
        check_ids(left, rows)
    elif rows is not None and rows != left.shape[1]:
        raise ValueError(f"rows is {rows}, but left is {left.shape[1]} wide")


WEIGHTED_SUM = Op(
    "weighted_sum(Tensor left, Tensor right, Tensor weights, SymInt? rows) -> Tensor",
    reference=_weighted_sum_reference,
    fake=_weighted_sum_fake,
    check=_check_weighted_sum,
)
WEIGHTED_SUM_INPLACE = Op(
    "weighted_sum_(Tensor(a!) out, Tensor left, Tensor right, Tensor weights) -> ()",
    reference=_weighted_sum_inplace_reference,
    fake=lambda out, left, right, weights: None,
    check=_check_weighted_sum_inplace,
)


def weighted_sum(
    left: Tensor, right: Tensor, weights: Tensor, out: Tensor | None = None, rows: int | None = None
) -> Tensor:
    """Weighted sum of all tokens' gradients, ``sum over t of weights[t] left[t] right[t]^T``.

    A token of weight 0 is left out by selection: a NaN or infinity in its rows never reaches the sum.

    Args:
        left: [N, m] float, any strides, or int64 ids [N].
        right: [N, n], float, any strides.
        weights: [N], float32 or float64.
        out: [m, n], float32 or float64: the sum is added to it, in place.
        rows: the rows of the table, for ids without ``out``.

    Returns:
        ``out``, or a new [m, n] matrix, float32 (float64 if a factor is float64).

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit, ids outside the table, ids without a table.
    """
    if out is None:
        return WEIGHTED_SUM(left, right, weights, rows)
    WEIGHTED_SUM_INPLACE(out, left, right, weights)
    return out


def _masked_weighted_sum_inplace_reference(
    out: Tensor, left: Tensor, right: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor
) -> None:
    masked = weighted_sum(left, right, weights_masked, rows=mask.shape[0])
    unmasked = weighted_sum(left, right, weights_unmasked, rows=mask.shape[0])
    out.add_(torch.where(mask, masked, unmasked))


def _masked_weighted_sum_reference(
    left: Tensor, right: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor
) -> Tensor:
    out = torch.zeros_like(_masked_weighted_sum_fake(left, right, weights_masked, weights_unmasked, mask))
    _masked_weighted_sum_inplace_reference(out, left, right, weights_masked, weights_unmasked, mask)
    return out


def _masked_weighted_sum_fake(
    left: Tensor, right: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor
) -> Tensor:
    return right.new_empty(mask.shape, dtype=accumulator(left, right))


def _check_masked_weighted_sum(
    left: Tensor, right: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor
) -> None:
    check_pair(left, right)
    _check_weights(weights_masked, right, "weights_masked")
    _check_weights(weights_unmasked, right, "weights_unmasked")
    check_mask(mask, left, right)


def _check_masked_weighted_sum_inplace(
    out: Tensor, left: Tensor, right: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor
) -> None:
    _check_masked_weighted_sum(left, right, weights_masked, weights_unmasked, mask)
    _check_sum_into(out, left, right)


MASKED_WEIGHTED_SUM = Op(
    "masked_weighted_sum(Tensor left, Tensor right, Tensor weights_masked, Tensor weights_unmasked, Tensor mask) "
    "-> Tensor",
    reference=_masked_weighted_sum_reference,
    fake=_masked_weighted_sum_fake,
    check=_check_masked_weighted_sum,
)
MASKED_WEIGHTED_SUM_INPLACE = Op(
    "masked_weighted_sum_(Tensor(a!) out, Tensor left, Tensor right, Tensor weights_masked, Tensor weights_unmasked, "
    "Tensor mask) -> ()",
    reference=_masked_weighted_sum_inplace_reference,
    fake=lambda out, left, right, weights_masked, weights_unmasked, mask: None,
    check=_check_masked_weighted_sum_inplace,
)


def masked_weighted_sum(
    left: Tensor,
    right: Tensor,
    weights_masked: Tensor,
    weights_unmasked: Tensor,
    mask: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Sum of all tokens' gradients, with one weight for masked and another for unmasked entries (Rap-FT's two blocks).

    A token whose weight is 0 for an entry is left out of it by selection, as in :func:`weighted_sum`.

    Args:
        left: [N, m], float, any strides; or int64 ids [N] of rows of a table, the mask's.
        right: [N, n], float, any strides.
        weights_masked: [N], float32 or float64: weights where ``mask`` is True.
        weights_unmasked: [N], float32 or float64: weights where it is False.
        mask: bool [m, n].
        out: [m, n], float32 or float64: the sum is added to it, in place.

    Returns:
        ``out``, or a new [m, n] matrix, float32 (float64 if a factor is float64).

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit.
    """
    if out is None:
        return MASKED_WEIGHTED_SUM(left, right, weights_masked, weights_unmasked, mask)
    MASKED_WEIGHTED_SUM_INPLACE(out, left, right, weights_masked, weights_unmasked, mask)
    return out
