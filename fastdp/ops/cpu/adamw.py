"""``adamw_noise_step_`` on processors: csrc/adamw.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import fastdp._native as _native
from fastdp.ops.adamw import firsts_of, float32_moments, unpack_numbers
from fastdp.ops.noise import NOISE_DTYPES
from fastdp.ops.stream import native_threads


def adamw_noise_step_(
    param: torch.Tensor,
    grad_sum: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    position: torch.Tensor,
    *rest: Any,
) -> None:
    """:func:`fastdp.ops.adamw_noise_step_` on a processor."""
    _step(param, grad_sum, exp_avg, exp_avg_sq, position, 0, *rest)


def _step(
    param: torch.Tensor,
    grad_sum: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    position: torch.Tensor,
    first: int,
    *rest: Any,
) -> None:
    numbers, rows, columns = unpack_numbers(rest)
    written = (param, exp_avg, exp_avg_sq)
    flat = weights, mean, square = [x.contiguous() for x in written]
    _native.adamw_noise_step(
        weights,
        NOISE_DTYPES[param.dtype],
        grad_sum.contiguous(),
        mean,
        square,
        param.numel(),
        first,
        position,
        numbers.secure_rounding,
        *numbers[:8],
        False,
        0.0,
        rows,
        columns,
        1 if columns is None else columns.numel(),
        native_threads(),
    )
    for x, result in zip(written, flat):
        if result is not x:
            x.copy_(result)


def adamw_noise_steps_(
    params: Sequence[torch.Tensor],
    grad_sums: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    drawn: torch.Tensor,
    *rest: Any,
) -> None:
    """:func:`fastdp.ops.adamw_noise_steps_` on a processor, one tensor after another."""
    numbers, rows, columns = unpack_numbers(rest)
    for i, (target, first) in enumerate(zip(masters or params, firsts_of(rest, len(params)))):
        axes = (rows[i], columns[i]) if rows else ()
        with float32_moments(exp_avgs[i], exp_avg_sqs[i], drawn[i], first) as (mean, square):
            _step(target, grad_sums[i], mean, square, drawn[i], first, *numbers, *axes)
        if masters:
            params[i].copy_(target)
