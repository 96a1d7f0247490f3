"""``clip_noise`` and its gradient on processors: csrc/clip.cpp."""

from __future__ import annotations

import torch

import fastdp._native as _native
from fastdp.ops.noise import DTYPES
from fastdp.ops.stream import native_threads


def clip_noise(
    x: torch.Tensor, max_norm: float, std: float, position: torch.Tensor, secure_rounding: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fastdp.ops.clip_noise` on a processor, and the norms."""
    flat = x.contiguous()
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    rows = x.shape[0]
    norm = torch.empty(rows, dtype=torch.float64)
    _native.clip_noise(
        flat.data_ptr(),
        out.data_ptr(),
        norm.data_ptr(),
        DTYPES[x.dtype],
        rows,
        x.numel() // rows if rows else 0,
        max_norm,
        std,
        position.data_ptr(),
        secure_rounding,
        native_threads(),
    )
    return out, norm


def clip_noise_backward(grad: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The gradient of :func:`fastdp.ops.clip_noise` on a processor."""
    g, flat, norm = grad.contiguous(), x.contiguous(), norm.contiguous()
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    rows = x.shape[0]
    _native.clip_backward(
        g.data_ptr(),
        flat.data_ptr(),
        norm.data_ptr(),
        out.data_ptr(),
        DTYPES[x.dtype],
        rows,
        x.numel() // rows if rows else 0,
        max_norm,
        native_threads(),
    )
    return out
