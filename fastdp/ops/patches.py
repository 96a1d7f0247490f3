"""The gradients of convolutions as torch makes them, and by image, from patches of what the kernel sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

#: Entries of unfolded patches that are in memory at once where each image's are used only once.
_PATCHES = {"cpu": 2**18, "cuda": 2**26}


class Convolution(NamedTuple):
    """A convolution as `torch.convolution` takes it, one number a dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def convolution_gradients(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, settings: Convolution, wanted: list[bool]
) -> list[torch.Tensor]:
    """The gradients of input, weight and bias that are ``wanted``, as torch makes them."""
    found: list[torch.Tensor] = torch.ops.aten.convolution_backward(gradient, x, weight, None, *settings, wanted)
    return found


def by_image(given: torch.Tensor, cut: torch.Tensor, weight: torch.Tensor, settings: Convolution) -> torch.Tensor:
    """The weight's gradient by image ``[images, *shape]``, a few images at a time."""
    images, groups = given.shape[0], settings.groups
    own = given.reshape(images * groups, weight.shape[0] // groups, -1)
    whole = own.new_empty((images * groups, weight.shape[0] // groups, weight[0].numel()))
    an_image = groups * weight[0].numel() * own.shape[2]
    step = max(1, _PATCHES.get(cut.device.type, _PATCHES["cpu"]) // max(1, an_image))
    for start in range(0, images, step):
        seen = patches(cut[start : start + step], weight.shape[2:], settings, given.shape[2:])
        here = slice(start * groups, (start + step) * groups)
        torch.bmm(own[here], seen.reshape(-1, weight[0].numel(), own.shape[2]).transpose(1, 2), out=whole[here])
    return whole.view(images, *weight.shape)


def patches(y: torch.Tensor, kernel: Sequence[int], settings: Convolution, sizes: Sequence[int]) -> torch.Tensor:
    """What the kernel sees at each of its positions: ``[images, channels x kernel, positions]``."""
    if any(settings.padding):
        y = F.pad(y, [pad for size in reversed(settings.padding) for pad in (size, size)])
    y = y.contiguous()
    own, strides = y.stride()[:2], y.stride()[2:]
    inside = (stride * step for stride, step in zip(strides, settings.dilation))
    along = (stride * step for stride, step in zip(strides, settings.stride))
    view = y.as_strided((*y.shape[:2], *kernel, *sizes), (*own, *inside, *along))
    return view.reshape(y.shape[0], y.shape[1] * math.prod(kernel), math.prod(sizes))
