"""``clip_noise`` and its gradient on processors: csrc/clip.cpp."""

from __future__ import annotations

import torch

import fastdp._native as _native
from fastdp.ops.noise import NOISE_DTYPES
from fastdp.ops.stream import native_threads


def clip_noise(
    x: torch.Tensor, max_norm: float, std: float, position: torch.Tensor, secure_rounding: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fastdp.ops.clip_noise` on a processor, and the norms."""
    flat = x.contiguous()
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    rows = x.shape[0]
    norm = torch.empty(rows, dtype=torch.float64)
    length, threads = x.numel() // max(rows, 1), native_threads()
    _native.clip_noise(
        flat, out, norm, NOISE_DTYPES[x.dtype], rows, length, max_norm, std, position, secure_rounding, threads
    )
    return out, norm


def clip_noise_backward(grad: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The gradient of :func:`fastdp.ops.clip_noise` on a processor."""
    g, flat, norm = grad.contiguous(), x.contiguous(), norm.contiguous()
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    rows, length = x.shape[0], x.numel() // max(x.shape[0], 1)
    _native.clip_backward(g, flat, norm, out, NOISE_DTYPES[x.dtype], rows, length, max_norm, native_threads())
    return out
