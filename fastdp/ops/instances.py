"""Per-unit gradients that are instantiated: their norms and weighted sums.

Vectors (norm weights, biases), matrices smaller than their factors (LoRA), and the one-example route have no factor pair:
there each unit's gradient lies in memory, a row of ``instances``. Norms and sums then are one reading of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .factors import FLOATS, accumulator, in_full_precision
from .sums import check_unit_weights
from .table import Op


def _check_instances(instances: Tensor) -> None:
    if instances.dim() < 1:
        raise ValueError("instances has no dimensions: it must be [units, ...]")
    if instances.dtype not in FLOATS:
        raise TypeError(f"instances is {instances.dtype}: it must be float32, bfloat16, float16 or float64")


def _check_mask(mask: Tensor, instances: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}: it must be bool")
    if mask.shape != instances.shape[1:]:
        raise ValueError(f"mask has shape {tuple(mask.shape)}: a gradient has {tuple(instances.shape[1:])}")
    if mask.device != instances.device:
        raise ValueError(f"mask is on {mask.device} and the instances on {instances.device}")


def _rows(instances: Tensor) -> Tensor:
    return instances.to(accumulator(instances)).reshape(instances.shape[0], math.prod(instances.shape[1:]))


@in_full_precision
def _sqnorm_reference(instances: Tensor) -> Tensor:
    return _rows(instances).square().sum(1)


@in_full_precision
def _abs_sum_reference(instances: Tensor) -> Tensor:
    return _rows(instances).abs().sum(1)


def _norm_fake(instances: Tensor) -> Tensor:
    return instances.new_empty(instances.shape[0], dtype=accumulator(instances))


INSTANCE_SQNORM = Op(
    "instance_sqnorm(Tensor instances) -> Tensor",
    reference=_sqnorm_reference,
    fake=_norm_fake,
    check=_check_instances,
)
INSTANCE_ABS_SUM = Op(
    "instance_abs_sum(Tensor instances) -> Tensor",
    reference=_abs_sum_reference,
    fake=_norm_fake,
    check=_check_instances,
)


def instance_sqnorm(instances: Tensor) -> Tensor:
    """Squared Frobenius norm of each unit's instantiated gradient.

    Args:
        instances: [B, ...], float, any strides.

    Returns:
        [B], float32 (float64 if ``instances`` is float64).

    Raises:
        TypeError, ValueError: another dtype, or no dimensions.
    """
    return INSTANCE_SQNORM(instances)


def instance_abs_sum(instances: Tensor) -> Tensor:
    """L1 norm of each unit's instantiated gradient; as :func:`instance_sqnorm`."""
    return INSTANCE_ABS_SUM(instances)


@in_full_precision
def _masked_sqnorm_reference(instances: Tensor, mask: Tensor) -> Tensor:
    squares, chosen = _rows(instances).square(), mask.reshape(-1)
    return torch.stack([torch.where(chosen, squares, 0).sum(1), torch.where(chosen, 0, squares).sum(1)])


def _check_masked_sqnorm(instances: Tensor, mask: Tensor) -> None:
    _check_instances(instances)
    _check_mask(mask, instances)


INSTANCE_MASKED_SQNORM = Op(
    "instance_masked_sqnorm(Tensor instances, Tensor mask) -> Tensor",
    reference=_masked_sqnorm_reference,
    fake=lambda instances, mask: instances.new_empty(2, instances.shape[0], dtype=accumulator(instances)),
    check=_check_masked_sqnorm,
)


def instance_masked_sqnorm(instances: Tensor, mask: Tensor) -> Tensor:
    """Squared norms of the masked and of the unmasked part of each unit's instantiated gradient, in one reading.

    Args:
        instances: [B, ...], float, any strides.
        mask: bool, the shape of one gradient.

    Returns:
        [2, B]: where ``mask`` is True, then where it is False; float32 (float64 if ``instances`` is float64).

    Raises:
        TypeError, ValueError: a dtype, shape or device outside the above.
    """
    return INSTANCE_MASKED_SQNORM(instances, mask)


def _selected_sum(instances: Tensor, weights: Tensor) -> Tensor:
    rows = _rows(instances)
    kept = torch.where((weights != 0).unsqueeze(1), rows, 0)
    return (weights.to(rows.dtype) @ kept).view(instances.shape[1:])


@in_full_precision
def _sum_reference(instances: Tensor, weights: Tensor) -> Tensor:
    return _selected_sum(instances, weights)


def _sum_fake(instances: Tensor, weights: Tensor) -> Tensor:
    return instances.new_empty(instances.shape[1:], dtype=accumulator(instances))


def _check_sum(instances: Tensor, weights: Tensor) -> None:
    _check_instances(instances)
    check_unit_weights(weights, instances)


INSTANCE_SUM = Op(
    "instance_sum(Tensor instances, Tensor weights) -> Tensor",
    reference=_sum_reference,
    fake=_sum_fake,
    check=_check_sum,
)


def instance_sum(instances: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the units' instantiated gradients.

    A unit of weight 0 is left out by selection: a NaN or infinity in it never reaches the sum.

    Args:
        instances: [B, ...], float, any strides.
        weights: [B], float32 or float64.

    Returns:
        The shape of one gradient, float32 (float64 if ``instances`` is float64).

    Raises:
        TypeError, ValueError: a dtype, shape or device outside the above.
    """
    return INSTANCE_SUM(instances, weights)


@in_full_precision
def _masked_sum_reference(instances: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, _selected_sum(instances, weights_masked), _selected_sum(instances, weights_unmasked))


def _check_masked_sum(instances: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor) -> None:
    _check_instances(instances)
    check_unit_weights(weights_masked, instances, "weights_masked")
    check_unit_weights(weights_unmasked, instances, "weights_unmasked")
    _check_mask(mask, instances)


INSTANCE_MASKED_SUM = Op(
    "instance_masked_sum(Tensor instances, Tensor weights_masked, Tensor weights_unmasked, Tensor mask) -> Tensor",
    reference=_masked_sum_reference,
    fake=lambda instances, weights_masked, weights_unmasked, mask: _sum_fake(instances, weights_masked),
    check=_check_masked_sum,
)


def instance_masked_sum(instances: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor) -> Tensor:
    """As :func:`instance_sum`, with one weight a unit for masked and another for unmasked entries.

    Args:
        instances: [B, ...], float, any strides.
        weights_masked: [B], float32 or float64: weights where ``mask`` is True.
        weights_unmasked: [B], float32 or float64: weights where it is False.
        mask: bool, the shape of one gradient.

    Returns:
        The shape of one gradient, float32 (float64 if ``instances`` is float64).

    Raises:
        TypeError, ValueError: a dtype, shape or device outside the above.
    """
    return INSTANCE_MASKED_SUM(instances, weights_masked, weights_unmasked, mask)
