"""``adamw_noise_step_`` on processors: csrc/adamw.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import fastdp._native as _native
from fastdp.ops.adamw import widened
from fastdp.ops.noise import DTYPES
from fastdp.ops.stream import native_threads


def adamw_noise_step_(
    param: torch.Tensor,
    grad_sum: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    position: torch.Tensor,
    std: float,
    divisor: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    variance_floor: float | None,
    secure_rounding: bool,
    rows: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
) -> None:
    """:func:`fastdp.ops.adamw_noise_step_` on a processor."""
    written = (param, exp_avg, exp_avg_sq)
    flat = [x.contiguous() for x in written]
    grad = grad_sum.contiguous()
    _native.adamw_noise_step(
        flat[0].data_ptr(),
        DTYPES[param.dtype],
        grad.data_ptr(),
        flat[1].data_ptr(),
        flat[2].data_ptr(),
        param.numel(),
        position.data_ptr(),
        secure_rounding,
        std,
        divisor,
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        step,
        variance_floor is not None,
        variance_floor or 0.0,
        0 if rows is None else rows.data_ptr(),
        0 if columns is None else columns.data_ptr(),
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
    std: float,
    divisor: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    variance_floor: float | None,
    secure_rounding: bool,
    rows: Sequence[torch.Tensor],
    columns: Sequence[torch.Tensor],
) -> None:
    """:func:`fastdp.ops.adamw_noise_steps_` on a processor, one tensor after another."""
    numbers = (std, divisor, lr, beta1, beta2, eps, weight_decay, step, variance_floor, secure_rounding)
    for i, target in enumerate(masters or params):
        axes = (rows[i], columns[i]) if rows else ()
        with widened(exp_avgs[i], exp_avg_sqs[i], drawn[i]) as (mean, square):
            adamw_noise_step_(target, grad_sums[i], mean, square, drawn[i], *numbers, *axes)
        if masters:
            params[i].copy_(target)
