"""Normalisation within a row by groups of channels: GroupNorm, and InstanceNorm, whose groups are single channels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.uses.lanes import Meeting, PerExampleParameter, lay_along_rows
from fastdp.engine.uses.reads import Reads
from fastdp.engine.uses.rows import BatchAxis
from fastdp.engine.uses.use import CaptureContext


class GroupNormUse(torch.autograd.Function):
    """Channels normalised over each of ``groups``, with trained weight or bias; x is [rows, channels, ...]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        groups: int,
        eps: float,
        context: CaptureContext,
        trained: tuple[bool, bool],
    ) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()
        x = x.contiguous()
        sizes = (x.shape[0], x.shape[1], math.prod(x.shape[2:]), groups)
        out, mean, rstd = torch.native_group_norm(x, weight, bias, *sizes, eps)
        ctx.context, ctx.sizes, ctx.scale = context, sizes, weight
        ctx.parameters = (weight if trained[0] else None, bias if trained[1] else None)
        ctx.save_for_backward(x, mean, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].contiguous()
        x, mean, rstd = ctx.saved_tensors
        sink, layout = ctx.context.open(), ctx.context.layout
        weight, bias = ctx.parameters
        rows, channels, size, groups = ctx.sizes
        if bias is not None:
            total = gradient.view(rows, channels, size).sum(2, dtype=torch.float32)
            sink.vector(bias, layout.by_lane(total), layout)
        if weight is not None:
            centred = x.view(rows, groups, -1) - mean.view(rows, groups, 1)
            total = centred.view(x.shape).mul_(gradient).view(rows, groups, -1, size).sum(3, dtype=torch.float32)
            sink.vector(weight, layout.by_lane((total * rstd.view(rows, groups, 1)).flatten(1)), layout)
        back = None
        if ctx.needs_input_grad[0]:
            back = torch.ops.aten.native_group_norm_backward(
                gradient, x, mean, rstd, ctx.scale, *ctx.sizes, [True, False, False]
            )[0]
        return back, None, None, None, None, None, None


def _group_norm(
    reads: Reads,
    context: CaptureContext,
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    if not reads.serve(weight, bias):
        return NotImplemented
    reads.require_rows("group_norm", (weight, bias), input, context)
    trained = (reads.is_trained(weight), reads.is_trained(bias))
    return GroupNormUse.apply(input, weight, bias, num_groups, eps, context, trained)


def _instance_norm(
    reads: Reads,
    context: CaptureContext,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if not reads.serve(weight, bias):
        return NotImplemented
    if running_mean is not None or not use_input_stats:
        raise UnsupportedUse("instance_norm with running statistics")
    reads.require_rows("instance_norm", (weight, bias), input, context)
    if torch.is_autocast_enabled(input.device.type):
        input = input.float()
    normed, channels = F.instance_norm(input, momentum=momentum, eps=eps), (-1, *[1] * (input.dim() - 2))
    meeting = Meeting(context, normed, BatchAxis())

    def along(own: torch.Tensor) -> torch.Tensor:
        if not reads.is_trained(own):
            return own.view(channels)
        return lay_along_rows(PerExampleParameter.of(own, context).view(channels), meeting)

    return normed * along(weight) + along(bias)


HANDLERS: dict[Any, Callable[..., Any]] = {F.group_norm: _group_norm, F.instance_norm: _instance_norm}
