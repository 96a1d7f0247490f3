"""Ops that look at each entry of a unit's gradient, one tile at a time: L1 norms and norms and sums under a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from .factors import accumulator, check_offsets, check_pair, in_full_precision, is_one_hot, unit_bounds, unit_gradient
from .norms import check_ids, table_rows
from .sums import check_sum_into, check_weights, weighted_sum
from .table import Op


def _check_mask(mask: Tensor, left: Tensor, right: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}: it must be bool")
    rows = mask.shape[0] if is_one_hot(left) and mask.dim() == 2 else left.shape[-1]
    if mask.shape != (rows, right.shape[1]):
        raise ValueError(f"mask has shape {tuple(mask.shape)}: the gradient has {(rows, right.shape[1])}")
    if mask.device != right.device:
        raise ValueError(f"mask is on {mask.device} and the factors on {right.device}")
    if is_one_hot(left):
        check_ids(left, mask.shape[0])


@in_full_precision
def _abs_sum_reference(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    bounds = unit_bounds(offsets)
    rows = table_rows(left)
    sums = [unit_gradient(left, right, a, b, rows).abs().sum() for a, b in zip(bounds, bounds[1:])]
    return torch.stack(sums) if sums else _abs_sum_fake(left, right, offsets)


def _abs_sum_fake(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    return right.new_empty(offsets.shape[0] - 1, dtype=accumulator(left, right))


def _check_abs_sum(left: Tensor, right: Tensor, offsets: Tensor) -> None:
    check_pair(left, right)
    check_offsets(offsets, right.shape[0], right.device)


ABS_SUM = Op(
    "abs_sum(Tensor left, Tensor right, Tensor offsets) -> Tensor",
    reference=_abs_sum_reference,
    fake=_abs_sum_fake,
    check=_check_abs_sum,
)


def abs_sum(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """L1 norm of each unit's gradient, tile by tile: DP-FROST's partition norms.

    Args:
        left: [N, m], float, any strides; or int64 ids [N], whose tokens add up within a unit before they are measured.
        right: [N, n], float, any strides.
        offsets: int64 [B + 1], from 0 to N, not decreasing; on the CPU or with the factors.

    Returns:
        [B], float32 (float64 if a factor is float64); 0 for empty units.

    Raises:
        TypeError, ValueError: a dtype, shape, device or offset outside the above.
    """
    return ABS_SUM(left, right, offsets)


@in_full_precision
def _masked_sqnorm_reference(left: Tensor, right: Tensor, offsets: Tensor, mask: Tensor) -> Tensor:
    bounds = unit_bounds(offsets)
    result = torch.zeros_like(_masked_sqnorm_fake(left, right, offsets, mask))
    for unit, (start, end) in enumerate(zip(bounds, bounds[1:])):
        squares = unit_gradient(left, right, start, end, mask.shape[0]).square()
        result[0, unit] = torch.where(mask, squares, 0).sum()
        result[1, unit] = torch.where(mask, 0, squares).sum()
    return result


def _masked_sqnorm_fake(left: Tensor, right: Tensor, offsets: Tensor, mask: Tensor) -> Tensor:
    return right.new_empty(2, offsets.shape[0] - 1, dtype=accumulator(left, right))


def _check_masked_sqnorm(left: Tensor, right: Tensor, offsets: Tensor, mask: Tensor) -> None:
    check_pair(left, right)
    check_offsets(offsets, right.shape[0], right.device)
    _check_mask(mask, left, right)


MASKED_SQNORM = Op(
    "masked_sqnorm(Tensor left, Tensor right, Tensor offsets, Tensor mask) -> Tensor",
    reference=_masked_sqnorm_reference,
    fake=_masked_sqnorm_fake,
    check=_check_masked_sqnorm,
)


def masked_sqnorm(left: Tensor, right: Tensor, offsets: Tensor, mask: Tensor) -> Tensor:
    """Squared norms of the masked and of the unmasked part of each unit's gradient, in one pass over its tiles.

    Args:
        left: [N, m], float, any strides; or int64 ids [N] of rows of a table, the mask's.
        right: [N, n], float, any strides.
        offsets: int64 [B + 1], from 0 to N, not decreasing; on the CPU or with the factors.
        mask: bool [m, n].

    Returns:
        [2, B]: where ``mask`` is True, then where it is False; float32 (float64 if a factor is float64).

    Raises:
        TypeError, ValueError: a dtype, shape, device or offset outside the above.
    """
    return MASKED_SQNORM(left, right, offsets, mask)


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
    check_weights(weights_masked, right, "weights_masked")
    check_weights(weights_unmasked, right, "weights_unmasked")
    _check_mask(mask, left, right)


def _check_masked_weighted_sum_inplace(
    out: Tensor, left: Tensor, right: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor
) -> None:
    _check_masked_weighted_sum(left, right, weights_masked, weights_unmasked, mask)
    check_sum_into(out, left, right)


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
