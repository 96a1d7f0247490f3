"""``add_noise_`` and its group on processors: csrc/noise.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import fastdp._native as _native
from fastdp.ops.noise import NOISE_DTYPES
from fastdp.ops.stream import native_threads


def add_noise_(x: torch.Tensor, std: float, position: torch.Tensor, secure_rounding: bool, first: int = 0) -> None:
    """:func:`fastdp.ops.add_noise_` on a processor."""
    add_noise_group_([x], [std], position.unsqueeze(0), secure_rounding, [first])


def add_noise_group_(
    xs: Sequence[torch.Tensor], stds: Sequence[float], drawn: torch.Tensor, secure_rounding: bool, firsts: Sequence[int]
) -> None:
    """:func:`fastdp.ops.add_noise_group_` on a processor, one tensor after another."""
    threads = native_threads()
    for x, std, position, first in zip(xs, stds, drawn.unbind(), firsts):
        if std == 0.0:
            continue
        flat = x.contiguous()
        _native.add_noise(flat, NOISE_DTYPES[x.dtype], first, x.numel(), std, position, secure_rounding, threads)
        if flat is not x:
            x.copy_(flat)
