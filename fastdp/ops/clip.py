"""Per-example clipping and noise of a hidden tensor in the forward pass (EW-FT, DP-Forward), and its gradient."""

from __future__ import annotations

from typing import Any

import torch

import fastdp._native as _native
from fastdp.ops.grid import on_grid
from fastdp.ops.noise import NOISE_DTYPES, check_grid, check_position, check_tensor, standard_normals
from fastdp.ops.stream import Draw, NoiseStream, native_threads
from fastdp.ops.table import Op
from fastdp.validate import at_least

#: The least bound. Entries of a clipped row may round to a multiple of 2^-149, which must not lengthen the row.
_LEAST_NORM = 2.0**-100


def _check_clip(
    x: torch.Tensor, max_norm: float, std: float, position: torch.Tensor | NoiseStream | Draw, secure_rounding: bool
) -> None:
    check_tensor("x", x)
    if x.dim() < 1:
        raise ValueError("x must have a first dimension of examples, got a tensor of no dimensions")
    at_least(0.0, std=std)
    at_least(_LEAST_NORM, max_norm=max_norm)
    if secure_rounding:
        check_grid("x", x, std)
    check_position(position)


def _is_clipped(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    # Rounding of its sum may move a norm by 2^-28 of itself.
    return norm > max_norm * (1.0 - 2.0**-28)


def _factors(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """``min(1, max_norm / norm)``, and 0 for a norm that is not finite: float64, same shape.

    Where it is below 1 it is smaller by 2^-21. Kernels multiply twice by its float32 root, since the factor itself may be below
    float32's range: their roundings are fewer, so that no row is ever left longer than the bound.
    """
    scale = torch.where(_is_clipped(norm, max_norm), max_norm / norm * (1.0 - 2.0**-21), 1.0)
    return torch.where(torch.isfinite(norm), scale, 0.0)


def _reference_clip_noise(
    x: torch.Tensor, max_norm: float, std: float, position: torch.Tensor, secure_rounding: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.reshape(x.shape[0], -1) if x.numel() else x.reshape(x.shape[0], 0)
    norm = torch.linalg.vector_norm(rows.double(), dim=1)
    factor = _factors(norm, max_norm)[:, None]
    clipped = torch.where(factor > 0.0, rows.double() * factor, 0.0)
    if secure_rounding and std > 0.0:
        return on_grid(clipped.float(), std, position).to(x.dtype).reshape(x.shape), norm
    z = standard_normals(position, x.numel()).to(x.device).reshape(rows.shape)
    return (clipped + std * z).to(x.dtype).reshape(x.shape), norm


def _reference_backward(grad: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    shape = (x.shape[0], -1) if x.numel() else (x.shape[0], 0)
    g, rows = grad.reshape(shape).double(), x.reshape(shape).double()
    factor = _factors(norm, max_norm)[:, None]
    pull = torch.where(_is_clipped(norm, max_norm), (g * rows).sum(1) / norm.square(), 0.0)[:, None]
    return torch.where(factor > 0.0, factor * (g - pull * rows), 0.0).to(x.dtype).reshape(x.shape)


def _check_backward(grad: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, max_norm: float) -> None:
    check_tensor("x", x)
    if grad.shape != x.shape or grad.dtype != x.dtype:
        raise ValueError(f"the gradient must be {x.dtype} {list(x.shape)}, got {grad.dtype} {list(grad.shape)}")
    if norm.shape != x.shape[:1] or norm.dtype != torch.float64:
        raise ValueError(f"norm must be float64 [{x.shape[0]}], got {norm.dtype} {list(norm.shape)}")
    at_least(0.0, max_norm=max_norm)


_CLIP_BACKWARD = Op(
    "clip_noise_backward(Tensor grad, Tensor x, Tensor norm, float max_norm) -> Tensor",
    reference=_reference_backward,
    fake=lambda grad, x, norm, max_norm: torch.empty_like(x, memory_format=torch.contiguous_format),
    check=_check_backward,
)
_CLIP_BACKWARD.in_family("clip")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.max_norm = inputs[1]
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor | None, grad_norm: None) -> tuple[Any, ...]:
    if grad is None:
        return None, None, None, None, None
    x, norm = ctx.saved_tensors
    return _CLIP_BACKWARD(grad, x, norm, ctx.max_norm), None, None, None, None


_CLIP_NOISE = Op(
    "clip_noise(Tensor x, float max_norm, float std, Tensor position, bool secure_rounding) -> (Tensor, Tensor)",
    reference=_reference_clip_noise,
    fake=lambda x, max_norm, std, position, secure_rounding: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(x.shape[0], dtype=torch.float64),
    ),
    check=_check_clip,
    backward=_backward,
    setup_context=_setup_context,
)
_CLIP_NOISE.in_family("clip")


def clip_noise(
    x: torch.Tensor, max_norm: float, std: float, stream: NoiseStream | Draw, *, secure_rounding: bool = True
) -> torch.Tensor:
    """Scale each example to Frobenius norm at most ``max_norm``, and add normal noise of standard deviation ``std``.

    ``y[b] = x[b] min(1, max_norm / |x[b]|) + std z[b]``, the release of DP-Forward (Du et al. 2023, arXiv 2309.06746)
    and EW-FT. Two examples differ by at most ``2 max_norm`` after the clip: the sensitivity of a local guarantee.
    Norms are summed in float64; the scaled value and the noise are added in float32 and rounded once to the dtype of
    ``x``. An example that holds an infinity or a NaN is removed by selection: its output is noise alone, its
    gradient zero. Rows are scaled to ``max_norm (1 - 2^-21)``, so that none is longer than the bound after rounding.
    Differentiable once in ``x``: the gradient is that of the clip, the noise being a constant.

    Args:
        x: [B, ...], at least one dimension; float32, bfloat16 or float16. Noise is placed by the flattened index.
        max_norm: the bound C, in the units of ``x``, at least 2^-100.
        std: in the units of ``x``; 0 clips only.
        stream: a ``NoiseStream`` or one position of it.
        secure_rounding: as in ``add_noise_``.

    Returns:
        A new contiguous tensor of the shape and dtype of ``x``.

    Raises:
        ValueError: if ``max_norm`` or ``std`` is out of range, or ``x`` has no dimension or too many elements.
        TypeError: if the dtype or layout of ``x`` is another, or ``stream`` is no stream.
        RuntimeError: if the position was drawn before.

    >>> clip_noise(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0, 0.0, NoiseStream())
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    return _CLIP_NOISE(x, max_norm, std, stream, secure_rounding)[0]


# On processors: csrc/clip.cpp.


@_CLIP_NOISE.on_cpu
def _clip_noise_on_cpu(
    x: torch.Tensor, max_norm: float, std: float, position: torch.Tensor, secure_rounding: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fastdp.ops.clip_noise` on a processor, and the norms."""
    flat = x.contiguous()
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    rows = x.shape[0]
    norm = torch.empty(rows, dtype=torch.float64)
    length, threads = x.numel() // max(rows, 1), native_threads()
    _native.clip_noise(
        flat, out, norm, NOISE_DTYPES[x.dtype], rows, length, max_norm, std, position, secure_rounding, threads
    )
    return out, norm


@_CLIP_BACKWARD.on_cpu
def _clip_noise_backward_on_cpu(
    grad: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, max_norm: float
) -> torch.Tensor:
    g, flat, norm = grad.contiguous(), x.contiguous(), norm.contiguous()
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    rows, length = x.shape[0], x.numel() // max(x.shape[0], 1)
    _native.clip_backward(g, flat, norm, out, NOISE_DTYPES[x.dtype], rows, length, max_norm, native_threads())
    return out
