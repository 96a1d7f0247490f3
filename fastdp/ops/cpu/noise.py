"""``add_noise_`` on processors: csrc/noise.cpp."""

from __future__ import annotations

import torch

import fastdp._native as _native
from fastdp.ops.noise import NOISE_DTYPES
from fastdp.ops.stream import native_threads


def add_noise_(x: torch.Tensor, std: float, position: torch.Tensor, secure_rounding: bool, first: int = 0) -> None:
    """:func:`fastdp.ops.add_noise_` on a processor."""
    if std == 0.0:
        return
    flat = x.contiguous()
    _native.add_noise(flat, NOISE_DTYPES[x.dtype], first, x.numel(), std, position, secure_rounding, native_threads())
    if flat is not x:
        x.copy_(flat)
