"""Convolutions of one, two and three dimensions: with strides, padding, dilation and groups, and transposed.

The forward pass and the gradient of the input are torch's own. The gradient of a unit's weight is a sum over positions of
backpropagated gradients times patches of the input (of a transposed convolution: of the input times patches of what is
backpropagated), which is a factor pair where the matrix is large and positions are few, and made whole where it is small.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.uses.factors import Factors
from fastdp.engine.uses.layout import Layout
from fastdp.engine.uses.reads import Reads
from fastdp.engine.uses.use import CaptureContext, Sink, Use, as_autocast
from fastdp.ops.patches import Convolution, by_image, convolution_gradients, patches
from fastdp.ops.routes import is_allowed

#: Floating-point operations of one image's weight gradient above which a processor has it made by torch's convolution, one
#: call an image, rather than by products with unfolded patches, whose copies cost more than the calls.
_OWN_CALL = 2**24
#: Entries of a weight whose gradients by image are made whole: they take no memory to speak of.
_SMALL = 2**13


class ConvolutionUse(Use):
    """A convolution with its weight, its bias or both trained; x is [rows, channels, ...]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        context: CaptureContext,
        settings: Convolution,
        trained: tuple[bool, bool],
    ) -> torch.Tensor:
        ctx.context, ctx.settings, ctx.x_dtype = context, settings, x.dtype
        ctx.parameters = (weight if trained[0] else None, bias if trained[1] else None)
        x, cast = as_autocast(x), as_autocast(weight)
        ctx.save_for_backward(x, cast)
        return torch.convolution(x, cast, as_autocast(bias), *settings)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        sink, layout = ctx.context.open(), ctx.context.layout
        matrix, bias = ctx.parameters
        if bias is not None:
            sink.vector(bias, layout.by_lane(gradient.flatten(2).sum(2, dtype=torch.float32)), layout)
        if matrix is not None:
            _capture(sink, matrix, x, gradient, weight, ctx.settings, layout)
        back = None
        if ctx.needs_input_grad[0]:
            back = convolution_gradients(gradient, x, weight, ctx.settings, [True, False, False])[0].to(ctx.x_dtype)
        return back, None, None, None, None, None


def _capture(
    sink: Sink,
    parameter: torch.nn.Parameter,
    x: torch.Tensor,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    settings: Convolution,
    layout: Layout,
) -> None:
    """Hand over the weight's gradient: as factors, or whole where that is predicted to be cheaper."""
    given, cut = (x, gradient) if settings.transposed else (gradient, x)
    rows, columns, positions = weight.shape[0], weight[0].numel(), math.prod(given.shape[2:])
    length, images = positions * x.shape[0] // max(1, layout.units), x.shape[0]
    # Patches would have to be laid out token by token besides, so gradients are made whole wherever they may be.
    small = rows * columns <= _SMALL or is_allowed("instantiate", rows, columns, length, layout.units, dtype=x.dtype)
    if settings.groups == 1 and not small and layout.token_segments is None:
        seen = patches(cut, weight.shape[2:], settings, given.shape[2:])
        left, right = (t.transpose(1, 2).flatten(0, 1) for t in (given.flatten(2), seen))
        factors = Factors(right, left, swap=True) if settings.transposed else Factors(left, right)
        sink.matrix(parameter, factors, layout)
        return
    work = 2 * positions * rows * columns
    if x.device.type == "cpu" and work > _OWN_CALL:
        each = layout.by_lane(torch.empty(images, 0)).shape[0]
        whole = torch.empty((each, *weight.shape), dtype=torch.float32)
        step = images // each
        for lane in range(each):
            own = slice(lane * step, (lane + 1) * step)
            whole[lane] = convolution_gradients(gradient[own], x[own], weight, settings, [False, True, False])[1]
    else:
        whole = layout.by_lane(by_image(given, cut, weight, settings))
    sink.vector(parameter, whole, layout)


def _numbers(value: Any, count: int) -> tuple[int, ...]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * count if len(numbers) == 1 else numbers


def _convolved(
    reads: Reads, context: CaptureContext, operation: str, x: Any, weight: Any, bias: Any, settings: Convolution
) -> torch.Tensor:
    if isinstance(x, torch.Tensor) and x.dim() != weight.dim():
        raise UnsupportedUse(f"{operation} of an input without rows")
    reads.require_rows(operation, (weight, bias), x, context)
    trained = (reads.is_trained(weight), reads.is_trained(bias))
    return ConvolutionUse.apply(x, weight, bias, context, settings, trained)


def _forwards(
    operation: str,
    reads: Reads,
    context: CaptureContext,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if not reads.serve(weight, bias):
        return NotImplemented
    count = weight.dim() - 2
    steps = _numbers(dilation, count)
    if padding == "same":
        whole = [step * (size - 1) for step, size in zip(steps, weight.shape[2:])]
        # Where the padding is odd, torch puts the one that is left over behind.
        left_over = F.pad(input, [pad for size in reversed(whole) for pad in (0, size % 2)])
        input, padding = left_over if any(size % 2 for size in whole) else input, [size // 2 for size in whole]
    pads = (0,) * count if padding == "valid" else _numbers(padding, count)
    settings = Convolution(_numbers(stride, count), pads, steps, False, (0,) * count, groups)
    return _convolved(reads, context, operation, input, weight, bias, settings)


def _transposed(
    operation: str,
    reads: Reads,
    context: CaptureContext,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    if not reads.serve(weight, bias):
        return NotImplemented
    count = weight.dim() - 2
    stride, padding, dilation, beside = (_numbers(v, count) for v in (stride, padding, dilation, output_padding))
    settings = Convolution(stride, padding, dilation, True, beside, groups)
    return _convolved(reads, context, operation, input, weight, bias, settings)


_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
HANDLERS: dict[Any, Callable[..., Any]] = {
    **{function: functools.partial(_forwards, function.__name__) for function in (F.conv1d, F.conv2d, F.conv3d)},
    **{function: functools.partial(_transposed, function.__name__) for function in _TRANSPOSED},
}
