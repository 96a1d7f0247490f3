"""Per-unit gradients that are instantiated: their norms and weighted sums.

Vectors (norm weights, biases), matrices smaller than their factors (LoRA), and the one-example route have no factor pair:
there each unit's gradient lies in memory, a row of ``instances``. Norms and sums then are one reading of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fastdp._native as _native

from .factors import ABSOLUTE, FLOATS, HAS_KERNELS, MASKED_SQUARE, SQUARE, accumulator, check_measure, check_weights
from .stream import native_threads
from .table import Op

#: Numbers that the definitions copy at a time.
_COPIED = 1 << 24


def _check_instances(instances: Tensor, mask: Tensor | None) -> None:
    if instances.dim() < 1:
        raise ValueError("instances has no dimensions: it must be [units, ...]")
    if instances.dtype not in FLOATS:
        raise TypeError(f"instances is {instances.dtype}: it must be float32, bfloat16, float16 or float64")
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}: it must be bool")
    if mask.shape != instances.shape[1:]:
        raise ValueError(f"mask has shape {tuple(mask.shape)}: a gradient has {tuple(instances.shape[1:])}")


def _is_plain(x: Tensor) -> bool:
    """Whether a kernel reads a tensor as it is: small gradients do not wait for the checks of `Op`."""
    return type(x) is Tensor and x.dtype is torch.float32 and x.is_cpu and x.is_contiguous() and not x.is_neg()


def _is_direct(op: Op, kernel: Callable[..., Any]) -> bool:
    """Whether a call may go straight to the kernel: there is one for this processor, and it is what the op runs."""
    return HAS_KERNELS and op.implementations.get("cpu") is kernel and not torch.compiler.is_compiling()


def _rows(instances: Tensor) -> Tensor:
    return instances.to(accumulator(instances)).reshape(instances.shape[0], math.prod(instances.shape[1:]))


def _parts(rows: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Columns of all rows, as many as are copied at a time, with their mask."""
    columns = max(1, _COPIED // max(1, rows.shape[0]))
    masks = itertools.repeat(None) if mask is None else mask.reshape(-1).split(columns)
    return zip(rows.split(columns, 1), masks)


def _norms_reference(instances: Tensor, measure: int, mask: Tensor | None) -> Tensor:
    rows, order = _rows(instances), 1 if measure == ABSOLUTE else 2

    def sums(part: Tensor) -> Tensor:
        # In float64: torch does not say in which order it adds.
        return torch.linalg.vector_norm(part, order, 1, dtype=torch.float64).pow(order)

    norms = [
        torch.stack([sums(part)] if chosen is None else [sums(part.where(chosen, 0)), sums(part.where(~chosen, 0))])
        for part, chosen in _parts(rows, mask)
    ]
    return torch.stack(norms).sum(0).to(rows.dtype)


def _norms_fake(instances: Tensor, measure: int, mask: Tensor | None) -> Tensor:
    return instances.new_empty(1 if mask is None else 2, instances.shape[0], dtype=accumulator(instances))


def _check_norms(instances: Tensor, measure: int, mask: Tensor | None) -> None:
    _check_instances(instances, mask)
    check_measure(measure, mask)


INSTANCE_NORMS = Op(
    "instance_norms(Tensor instances, int measure, Tensor? mask) -> Tensor",
    reference=_norms_reference,
    fake=_norms_fake,
    check=_check_norms,
)
# On a GPU a launch for one of them takes the host longer than torch's.
INSTANCE_NORMS.implement("cuda", INSTANCE_NORMS.reference)


def instance_sqnorm(instances: Tensor) -> Tensor:
    """Squared Frobenius norm of each unit's instantiated gradient.

    Args:
        instances: [B, ...], float, any strides.

    Returns:
        [B], float32 (float64 if ``instances`` is float64).

    Raises:
        TypeError, ValueError: another dtype, or no dimensions.

    >>> gradients = torch.tensor([[3.0, -4.0], [1.0, 0.0]])  # of two units
    >>> instance_sqnorm(gradients)
    tensor([25.,  1.])
    """
    if _is_plain(instances) and instances.dim() and _is_direct(INSTANCE_NORMS, _instance_norms_on_cpu):
        return _squares([instances])[0]
    return INSTANCE_NORMS(instances, SQUARE, None)[0]


def instance_abs_sum(instances: Tensor) -> Tensor:
    """L1 norm of each unit's instantiated gradient, as `instance_sqnorm` has the square of the other."""
    return INSTANCE_NORMS(instances, ABSOLUTE, None)[0]


def instance_masked_sqnorm(instances: Tensor, mask: Tensor) -> Tensor:
    """As `instance_sqnorm`, of the entries where ``mask`` is True, then of those where it is False: [2, B], in one reading."""
    return INSTANCE_NORMS(instances, MASKED_SQUARE, mask)


def _selected_sum(rows: Tensor, weights: Tensor) -> Tensor:
    return weights.to(rows.dtype) @ torch.where((weights != 0).unsqueeze(1), rows, 0)


def _sum_reference(instances: Tensor, weights: Tensor, weights_unmasked: Tensor | None, mask: Tensor | None) -> Tensor:
    totals = []
    for part, chosen in _parts(_rows(instances), mask):
        total = _selected_sum(part, weights)
        if chosen is not None and weights_unmasked is not None:
            total = total.where(chosen, _selected_sum(part, weights_unmasked))
        totals.append(total)
    return torch.cat(totals).view(instances.shape[1:])


def _sum_fake(instances: Tensor, weights: Tensor, weights_unmasked: Tensor | None, mask: Tensor | None) -> Tensor:
    return instances.new_empty(instances.shape[1:], dtype=accumulator(instances))


def _check_sum(instances: Tensor, weights: Tensor, weights_unmasked: Tensor | None, mask: Tensor | None) -> None:
    _check_instances(instances, mask)
    if weights_unmasked is None:
        check_weights(weights, instances, "unit")
    else:
        check_weights(weights, instances, "unit", "weights_masked")
        check_weights(weights_unmasked, instances, "unit", "weights_unmasked")


INSTANCE_SUM = Op(
    "instance_sum(Tensor instances, Tensor weights, Tensor? weights_unmasked, Tensor? mask) -> Tensor",
    reference=_sum_reference,
    fake=_sum_fake,
    check=_check_sum,
)
INSTANCE_SUM.implement("cuda", INSTANCE_SUM.reference)


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

    >>> gradients = torch.tensor([[3.0, -4.0], [1.0, 0.0]])  # of two units
    >>> instance_sum(gradients, torch.tensor([0.2, 1.0]))
    tensor([ 1.6000, -0.8000])
    """
    both = _is_plain(instances) and _is_plain(weights) and instances.dim() and weights.shape == instances.shape[:1]
    if both and _is_direct(INSTANCE_SUM, _instance_sum_on_cpu):
        return _sum(instances, weights)
    return INSTANCE_SUM(instances, weights, None, None)


def instance_masked_sum(instances: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor) -> Tensor:
    """As `instance_sum`, with one weight a unit for entries where ``mask`` is True and another for the others."""
    return INSTANCE_SUM(instances, weights_masked, weights_unmasked, mask)


def _check_group(instances: Sequence[Tensor]) -> None:
    if not instances:
        raise ValueError("instances is empty: give at least one tensor")
    first = instances[0]
    for x in instances:
        if x.dim() < 1 or x.dtype not in FLOATS:
            _check_instances(x, None)
        if x.shape[0] != first.shape[0]:
            raise ValueError(
                f"instances are of {first.shape[0]} and of {x.shape[0]} units: they must belong to the same units"
            )


INSTANCE_NORMS_GROUP = Op(
    "instance_norms_group(Tensor[] instances) -> Tensor",
    reference=lambda instances: torch.stack([instance_sqnorm(x) for x in instances]),
    fake=lambda instances: instances[0].new_empty(len(instances), instances[0].shape[0], dtype=accumulator(*instances)),
    check=_check_group,
)
INSTANCE_NORMS_GROUP.in_family("groups")


def instance_sqnorm_group(instances: Sequence[Tensor]) -> Tensor:
    """`instance_sqnorm` of k parameters' gradients of the same units, [k, B]: on a GPU in one launch."""
    return INSTANCE_NORMS_GROUP(list(instances))


def _check_sum_group(instances: Sequence[Tensor], weights: Tensor) -> None:
    _check_group(instances)
    if weights.shape != (len(instances), instances[0].shape[0]) or weights.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"weights are {weights.dtype} {list(weights.shape)}: one a tensor and unit is float "
            f"[{len(instances)}, {instances[0].shape[0]}]"
        )


INSTANCE_SUM_GROUP = Op(
    "instance_sum_group(Tensor[] instances, Tensor weights) -> Tensor[]",
    reference=lambda instances, weights: [*map(instance_sum, instances, weights)],
    fake=lambda instances, weights: [_sum_fake(x, weights, None, None) for x in instances],
    check=_check_sum_group,
)
INSTANCE_SUM_GROUP.in_family("groups")


def instance_sum_group(instances: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """`instance_sum` of k parameters' gradients of the same units, by weights [k, B]: on a GPU in one launch."""
    return INSTANCE_SUM_GROUP(list(instances), weights)


# On processors: csrc/instances.cpp, for contiguous float32.


def _served(instances: Tensor) -> bool:
    return HAS_KERNELS and instances.dtype == torch.float32 and instances.is_contiguous()


@INSTANCE_NORMS.on_cpu
def _instance_norms_on_cpu(instances: Tensor, measure: int, mask: Tensor | None) -> Tensor:
    if not _served(instances):
        return NotImplemented
    units, mask = instances.shape[0], None if mask is None else mask.contiguous()
    norms = torch.empty(1 if mask is None else 2, units)
    size = instances.numel() // max(1, units)
    _native.instance_norms(instances, units, size, measure, mask, norms, native_threads())
    return norms


@INSTANCE_SUM.on_cpu
def _instance_sum_on_cpu(
    instances: Tensor, weights: Tensor, weights_unmasked: Tensor | None, mask: Tensor | None
) -> Tensor:
    if not (_served(instances) and weights.dtype == torch.float32):
        return NotImplemented
    if mask is None or weights_unmasked is None:
        return _sum(instances, weights.contiguous())
    if weights_unmasked.dtype != torch.float32:
        return NotImplemented
    total = torch.empty([*instances.shape[1:]])
    both = weights.contiguous(), weights_unmasked.contiguous()
    given = instances, instances.shape[0], total.numel(), *both, mask.contiguous()
    _native.instance_masked_sum(*given, total, native_threads())
    return total


def _sum(instances: Tensor, weights: Tensor) -> Tensor:
    """The sum of instances that are served, by contiguous float32 weights."""
    units, *shape = instances.shape
    # Three times as fast as with a list.
    total = torch.empty(*shape) if shape else torch.empty(())
    _native.instance_sum(instances, units, total.numel(), weights, total, native_threads())
    return total


def _squares(instances: Sequence[Tensor]) -> Tensor:
    """The squared norms [k, B] of instances that are served, one parameter's after another."""
    units, threads = instances[0].shape[0], native_threads()
    norms = torch.empty(len(instances), units)
    address, row = norms.data_ptr(), norms.itemsize * units
    for at, x in enumerate(instances):
        _native.instance_norms(x, units, x.numel() // (units or 1), SQUARE, None, address + at * row, threads)
    return norms


@INSTANCE_NORMS_GROUP.on_cpu
def _instance_norms_group_on_cpu(instances: Sequence[Tensor]) -> Tensor:
    return _squares(instances) if all(map(_served, instances)) else NotImplemented


@INSTANCE_SUM_GROUP.on_cpu
def _instance_sum_group_on_cpu(instances: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    if all(map(_served, instances)) and weights.dtype == torch.float32:
        return list(map(_sum, instances, weights.contiguous().unbind()))
    return NotImplemented
