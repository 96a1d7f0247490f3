"""Normalisation within a row by groups of channels: GroupNorm, and InstanceNorm, whose groups are single channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.uses.reads import Reads
from fastdp.engine.uses.rows import BatchAxis
from fastdp.engine.uses.use import CaptureContext, expand_with_capture


def _scaled(reads: Reads, context: CaptureContext, normed: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    """What was normalised, ``[rows, channels, ...]``, times each row's copy of the weight, plus its copy of the bias."""
    layout, ones = context.layout, [1] * (normed.dim() - 2)
    if layout.token_segments is not None:
        raise UnsupportedUse("a normalisation by channels of packed rows")
    for own, combine in ((weight, torch.mul), (bias, torch.add)):
        if reads.is_trained(own):
            lanes = expand_with_capture(own, normed, context, 0)
            lanes = BatchAxis().spread(lanes, normed.shape[0], layout.rows)
            normed = combine(normed, lanes.view(*lanes.shape, *ones))
        elif own is not None:
            normed = combine(normed, own.view(-1, *ones))
    return normed


def _wide(x: torch.Tensor) -> torch.Tensor:
    """The input in float32 under autocast, where torch's own norms compute."""
    return x.float() if torch.is_autocast_enabled(x.device.type) else x


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
    return _scaled(reads, context, F.group_norm(_wide(input), num_groups, eps=eps), weight, bias)


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
    return _scaled(reads, context, F.instance_norm(_wide(input), momentum=momentum, eps=eps), weight, bias)


HANDLERS: dict[Any, Callable[..., Any]] = {F.group_norm: _group_norm, F.instance_norm: _instance_norm}
