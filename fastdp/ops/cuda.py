"""Norms, sums and snapping on CUDA devices: each op's arguments brought to the launchers of ``fastdp.kernels``.

Importing this module imports no Triton: the kernels are imported by the first call that needs them. Where Triton is not
installed, and for float64 factors, torch serves. Nothing here waits for the device, except ``snap`` and the ops built
on it, which must look whether rows are finite before they may answer.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import torch_norms
from .choice import EXPONENTIAL_CHOICE
from .dchi import PRIVATE_SNAP, _refuse_overflow
from .factors import is_one_hot
from .instances import INSTANCE_ABS_SUM, INSTANCE_MASKED_SQNORM, INSTANCE_MASKED_SUM, INSTANCE_SQNORM, INSTANCE_SUM
from .norms import ABS_SUM, CROSS_INNER, MASKED_SQNORM, SQNORM, SQNORM_GROUP
from .snap import SNAP, refuse_non_finite
from .sums import (
    COLUMN_SUMS,
    MASKED_WEIGHTED_SUM,
    MASKED_WEIGHTED_SUM_INPLACE,
    PER_UNIT,
    PER_UNIT_GROUP,
    WEIGHTED_SUM,
    WEIGHTED_SUM_INPLACE,
)
from .table import Op


@functools.cache
def _kernels(module: str) -> ModuleType:
    return importlib.import_module(f"fastdp.kernels.{module}")


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _is_wide(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_wide(v) for v in value)
    return isinstance(value, Tensor) and value.dtype == torch.float64


def _serve(op: Op, otherwise: Callable[..., Any], factors: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register for CUDA a function that is for Triton, and for arguments among whose first ``factors`` none is float64."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with torch.no_grad():
                return (function if _has_triton() and not _is_wide(args[:factors]) else otherwise)(*args)

        op.implement("cuda")(run)
        return function

    return register


def _assert_ids(ids: Tensor, rows: int) -> None:
    # An assertion on the device: an id outside the table must not become an address, and the host must not wait.
    torch._assert_async(((ids >= 0) & (ids < rows)).all(), "an id is outside the table")


def _cheaper_route(left: Tensor, right: Tensor, offsets: Tensor) -> str:
    """By flops, with T^2 (m + n) for Gram and 2 T m n for direct; lengths on the device are taken to be equal."""
    m, n, tokens = left.shape[1], right.shape[1], right.shape[0]
    if offsets.device.type == "cpu":
        pairs = float(offsets.diff().square().sum())
    else:
        pairs = tokens * tokens / max(1, offsets.shape[0] - 1)
    return "gram" if pairs * (m + n) <= 2 * tokens * m * n else "direct"


@_serve(SQNORM, torch_norms.sqnorm, 2)
def sqnorm(left: Tensor, right: Tensor, offsets: Tensor, route: str) -> Tensor:
    """:func:`fastdp.ops.sqnorm` on a CUDA device."""
    if is_one_hot(left):
        return _kernels("onehot").onehot_sqnorm(left, right, offsets)
    if route == "auto":
        route = _cheaper_route(left, right, offsets)
    if route == "gram":
        return _kernels("gram").gram_sqnorm_group([left], right, offsets)[0]
    return _kernels("direct").direct_sqnorm(left, right, offsets)


@_serve(SQNORM_GROUP, torch_norms.sqnorm_group, 2)
def sqnorm_group(lefts: Sequence[Tensor], right: Tensor, offsets: Tensor) -> Tensor:
    """:func:`fastdp.ops.sqnorm_group` on a CUDA device."""
    return _kernels("gram").gram_sqnorm_group(lefts, right, offsets)


@_serve(CROSS_INNER, torch_norms.cross_inner, 4)
def cross_inner(
    left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, offsets1: Tensor, offsets2: Tensor
) -> Tensor:
    """:func:`fastdp.ops.cross_inner` on a CUDA device."""
    for ids, other in ((left1, left2), (left2, left1)):
        if is_one_hot(ids) and not is_one_hot(other):
            _assert_ids(ids, other.shape[1])
    return _kernels("cross").cross_inner(left1, right1, left2, right2, offsets1, offsets2)


@_serve(ABS_SUM, torch_norms.abs_sum, 2)
def abs_sum(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """:func:`fastdp.ops.abs_sum` on a CUDA device."""
    if is_one_hot(left):
        return _kernels("onehot").onehot_abs_sum(left, right, offsets)
    return _kernels("direct").abs_sum(left, right, offsets)


@_serve(MASKED_SQNORM, torch_norms.masked_sqnorm, 2)
def masked_sqnorm(left: Tensor, right: Tensor, offsets: Tensor, mask: Tensor) -> Tensor:
    """:func:`fastdp.ops.masked_sqnorm` on a CUDA device."""
    if is_one_hot(left):
        _assert_ids(left, mask.shape[0])
        return _kernels("onehot").onehot_masked_sqnorm(left, right, offsets, mask)
    return _kernels("direct").masked_sqnorm(left, right, offsets, mask)


@_serve(PER_UNIT, PER_UNIT.reference, 2)
def per_unit(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """:func:`fastdp.ops.per_unit` on a CUDA device."""
    return _kernels("grouped").per_unit_group([left], [right], offsets)[0][0]


@_serve(PER_UNIT_GROUP, PER_UNIT_GROUP.reference, 2)
def per_unit_group(lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor) -> tuple[list[Tensor], Tensor]:
    """:func:`fastdp.ops.per_unit_group` on a CUDA device: one launch for all matrices of the same dtypes."""
    return _kernels("grouped").per_unit_group(lefts, rights, offsets)


@_serve(COLUMN_SUMS, COLUMN_SUMS.reference, 1)
def column_sums(left: Tensor, offsets: Tensor) -> Tensor:
    """:func:`fastdp.ops.column_sums` on a CUDA device: the gradient against inputs of 1."""
    ones = left.new_ones(1, 1).expand(left.shape[0], 1)
    return _kernels("grouped").per_unit_group([left], [ones], offsets)[0][0].squeeze(2)


@_serve(WEIGHTED_SUM_INPLACE, WEIGHTED_SUM_INPLACE.reference, 3)
def weighted_sum_(out: Tensor, left: Tensor, right: Tensor, weights: Tensor) -> None:
    """:func:`fastdp.ops.weighted_sum` into ``out`` on a CUDA device."""
    if is_one_hot(left):
        _assert_ids(left, out.shape[0])
        _kernels("onehot").onehot_weighted_sum_(out, left, right, weights)
    else:
        _kernels("weighted").weighted_sum_(out, left, right, weights)


@_serve(WEIGHTED_SUM, WEIGHTED_SUM.reference, 2)
def weighted_sum(left: Tensor, right: Tensor, weights: Tensor, rows: int | None) -> Tensor:
    """:func:`fastdp.ops.weighted_sum` on a CUDA device."""
    m = rows if is_one_hot(left) else left.shape[1]
    assert m is not None
    out = torch.zeros(m, right.shape[1], device=right.device)
    weighted_sum_(out, left, right, weights)
    return out


@_serve(MASKED_WEIGHTED_SUM_INPLACE, MASKED_WEIGHTED_SUM_INPLACE.reference, 3)
def masked_weighted_sum_(
    out: Tensor, left: Tensor, right: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor
) -> None:
    """:func:`fastdp.ops.masked_weighted_sum` into ``out`` on a CUDA device."""
    if is_one_hot(left):
        _assert_ids(left, out.shape[0])
        _kernels("onehot").onehot_weighted_sum_(out, left, right, weights_masked, weights_unmasked, mask)
    else:
        _kernels("weighted").masked_weighted_sum_(out, left, right, weights_masked, weights_unmasked, mask)


@_serve(MASKED_WEIGHTED_SUM, MASKED_WEIGHTED_SUM.reference, 2)
def masked_weighted_sum(
    left: Tensor, right: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor
) -> Tensor:
    """:func:`fastdp.ops.masked_weighted_sum` on a CUDA device."""
    out = torch.zeros(mask.shape, device=right.device)
    masked_weighted_sum_(out, left, right, weights_masked, weights_unmasked, mask)
    return out


@_serve(INSTANCE_SQNORM, INSTANCE_SQNORM.reference, 1)
def instance_sqnorm(instances: Tensor) -> Tensor:
    """:func:`fastdp.ops.instance_sqnorm` on a CUDA device."""
    return _kernels("instances").instance_sqnorm(instances)


@_serve(INSTANCE_ABS_SUM, INSTANCE_ABS_SUM.reference, 1)
def instance_abs_sum(instances: Tensor) -> Tensor:
    """:func:`fastdp.ops.instance_abs_sum` on a CUDA device."""
    return _kernels("instances").instance_abs_sum(instances)


@_serve(INSTANCE_MASKED_SQNORM, INSTANCE_MASKED_SQNORM.reference, 1)
def instance_masked_sqnorm(instances: Tensor, mask: Tensor) -> Tensor:
    """:func:`fastdp.ops.instance_masked_sqnorm` on a CUDA device."""
    return _kernels("instances").instance_masked_sqnorm(instances, mask)


@_serve(INSTANCE_SUM, INSTANCE_SUM.reference, 1)
def instance_sum(instances: Tensor, weights: Tensor) -> Tensor:
    """:func:`fastdp.ops.instance_sum` on a CUDA device."""
    return _kernels("instances").instance_sum(instances, weights.contiguous())


@_serve(INSTANCE_MASKED_SUM, INSTANCE_MASKED_SUM.reference, 1)
def instance_masked_sum(instances: Tensor, weights_masked: Tensor, weights_unmasked: Tensor, mask: Tensor) -> Tensor:
    """:func:`fastdp.ops.instance_masked_sum` on a CUDA device."""
    weights = weights_masked.contiguous(), weights_unmasked.contiguous()
    return _kernels("instances").instance_sum(instances, *weights, mask)


@_serve(SNAP, SNAP.reference, 2)
def snap(x: Tensor, table: Tensor) -> Tensor:
    """:func:`fastdp.ops.snap` on a CUDA device."""
    kernels = _kernels("snap")
    half_table, bad = kernels.survey(table)
    half_x, bad_x = kernels.survey(x)
    for name, rows, found in (("table", table, bad), ("x", x, bad_x)):
        if kernels.named_bad_row(found) is not None:
            refuse_non_finite(name, rows)
    return kernels.snap(x, table, half_x, half_table)


@_serve(PRIVATE_SNAP, PRIVATE_SNAP.reference, 2)
def private_snap(ids: Tensor, table: Tensor, eta: Tensor, position: Tensor) -> Tensor:
    """:func:`fastdp.ops.private_snap` on a CUDA device."""
    kernels = _kernels("snap")
    half_table, bad = kernels.survey(table)
    if kernels.named_bad_row(bad) is not None:
        refuse_non_finite("table", table)
    noisy = _kernels("dchi").dchi_rows(ids.reshape(-1).contiguous(), table, eta.reshape(-1), position)
    half_noisy, bad = kernels.survey(noisy)
    _refuse_overflow(kernels.named_bad_row(bad) is None)
    return kernels.snap(noisy, table, half_noisy, half_table).view(ids.shape)


@_serve(EXPONENTIAL_CHOICE, EXPONENTIAL_CHOICE.reference, 2)
def exponential_choice(
    ids: Tensor,
    table: Tensor,
    scale: Tensor,
    position: Tensor,
    cap: float | None,
    log_prior: Tensor | None,
    candidate_scale: Tensor | None,
) -> Tensor:
    """:func:`fastdp.ops.exponential_choice` on a CUDA device: draw by draw as the definition."""
    refuse_non_finite("table", table)
    return _kernels("choice").exponential_choice(ids, table, scale, position, cap, log_prior, candidate_scale)
