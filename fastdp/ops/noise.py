"""Gaussian noise on the way through memory: ``add_noise_``, with the definition of the normals all noise ops share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import fastdp._native as _native
from fastdp.ops.grid import on_grid
from fastdp.ops.stream import MAX_ELEMENTS, Draw, NoiseStream, chacha_words, check_positions, native_threads
from fastdp.ops.table import Op
from fastdp.validate import at_least

#: The dtypes noise may be added to, with their numbers in ``csrc/noise.h``. Noise itself is always float32.
NOISE_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Elements that secure rounding has noise for: the second half of a position's blocks continues the uniforms of the first.
_LARGEST_ROUNDED = MAX_ELEMENTS // 2


def standard_normals(position: torch.Tensor, n: int, first: int = 0) -> torch.Tensor:
    """The definition of the noise: the normals of elements ``first`` .. ``first + n - 1`` at ``position``, float64 [n]."""
    begin = first // 16
    blocks = -(-(first + n) // 16) - begin
    words, second = chacha_words(position, begin, blocks), chacha_words(position, begin, blocks, second=True)
    radius, angle = normal_parts(words[:, :8], second[:, :8], words[:, 8:])
    pairs = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return torch.from_numpy(pairs.reshape(-1)[first - 16 * begin :][:n])


def normal_parts(word: np.ndarray, second: np.ndarray, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Radius and angle, float64, of pairs with radius words ``word``, their continuation ``second``, and ``turn``."""
    w = word.astype(np.float64)
    plain = (w + 0.5) / 2.0**32
    wide = (w * 2.0**32 + second + 0.5) / 2.0**64
    # Near 1 the logarithm is taken of the exact distance from 1; the two agree wherever both are accurate.
    log = np.where(
        plain > 0.5, np.log1p(-((2.0**32 - w) - 0.5) / 2.0**32), np.log(np.where(word < 1 << 16, wide, plain))
    )
    return np.sqrt(-2.0 * log), (turn.astype(np.float64) + 0.5) * (2.0 * np.pi / 2.0**32)


def check_tensor(name: str, x: torch.Tensor, dtypes: Any = NOISE_DTYPES, first: int = 0) -> None:
    """Refuse what the noise kernels are not defined on: other dtypes and layouts, and elements from 2^36 on."""
    if x.dtype not in dtypes or x.layout != torch.strided:
        wanted = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} must be a dense tensor of {wanted}, got {x.layout} {x.dtype}")
    if first + x.numel() > MAX_ELEMENTS:
        raise ValueError(f"{name} has {first + x.numel()} elements, more than the 2^36 that one position has noise for")


def check_grid(name: str, x: torch.Tensor, std: float, first: int = 0) -> None:
    """Refuse what secure rounding is not defined on: more than 2^35 elements, and noise near the ends of float32."""
    if first + x.numel() > _LARGEST_ROUNDED:
        raise ValueError(
            f"{name} has {first + x.numel()} elements, more than the 2^35 that secure rounding has noise for"
        )
    if std > 0.0 and not 2.0**-100 <= std <= 2.0**100:
        raise ValueError(f"std is {std:g}: secure rounding needs it between 2^-100 and 2^100")


def check_position(position: torch.Tensor | NoiseStream | Draw) -> None:
    """Refuse what is neither a stream nor a position: int32 [12] on the CPU, as ``NoiseStream.take`` returns."""
    if isinstance(position, (NoiseStream, Draw)):
        return
    if not isinstance(position, torch.Tensor):
        raise TypeError(
            f"the last argument must be a NoiseStream (or stream.at(step, tensor)), got {type(position).__name__}"
        )
    check_positions(position)


def _check_add_noise(
    x: torch.Tensor, std: float, position: torch.Tensor, secure_rounding: bool, first: int = 0
) -> None:
    _check_noised(x, std, secure_rounding, first)
    check_position(position)


def _check_noised(x: torch.Tensor, std: float, secure_rounding: bool, first: int) -> None:
    if not isinstance(first, int) or first < 0:
        raise ValueError(f"first is {first!r}: the elements of a position are counted from 0")
    check_tensor("x", x, first=first)
    if type(std) is not float or not 0.0 <= std < math.inf:
        at_least(0.0, std=std)
    if secure_rounding:
        check_grid("x", x, std, first)


def _reference_add_noise(
    x: torch.Tensor, std: float, position: torch.Tensor, secure_rounding: bool, first: int = 0
) -> None:
    if secure_rounding and std > 0.0:
        x.copy_(on_grid(x, std, position, first))
        return
    z = standard_normals(position, x.numel(), first).to(device=x.device, dtype=torch.float32)
    x.copy_(torch.add(x.float(), z.reshape(x.shape), alpha=std))


_ADD_NOISE = Op(
    "add_noise_(Tensor(a!) x, float std, Tensor position, bool secure_rounding, int first=0) -> ()",
    reference=_reference_add_noise,
    fake=lambda x, std, position, secure_rounding, first=0: None,
    check=_check_add_noise,
)
_ADD_NOISE.in_family("noise")


def add_noise_(
    x: torch.Tensor, std: float, stream: NoiseStream | Draw, *, secure_rounding: bool = True, first: int = 0
) -> torch.Tensor:
    """Add independent normal noise of standard deviation ``std`` to ``x`` in place, and return ``x``.

    Noise is made in float32 whatever the dtype of ``x``, and rounded once, after the addition. Element i of the
    flattened tensor gets normal ``first + i`` of the claimed position, whatever the strides of ``x``.

    Args:
        x: any shape; float32, bfloat16 or float16; at most 2^36 elements.
        std: in the units of ``x``; 0 leaves ``x`` as it is.
        stream: a ``NoiseStream`` or one position of it; claimed even when ``std`` is 0.
        secure_rounding: round the noised numbers to a grid, as if the normals and the addition were exact: the result
            is then a function of a real Gaussian release and gives away nothing that arithmetic would have added
            (see `fastdp.ops.grid` and docs/noise.md). At most 2^35 elements. Turned off, it is float32 noise added in
            float32, whose gaps tell an observer of exact values what the sum was.
        first: where ``x`` begins in the tensor that the position is of: processes that hold a piece each add the noise that
            the whole would get.

    Raises:
        ValueError: if ``std`` is negative or not finite, elements of ``x`` share memory, or it is too large or ends too far on.
        TypeError: if the dtype or layout of ``x`` is another, or ``stream`` is no stream.
        RuntimeError: if ``x`` requires grad and grad mode is on, or the position was drawn before.

    >>> total = torch.zeros(1000)
    >>> add_noise_(total, 2.0, NoiseStream()) is total
    True
    >>> bool(1.7 < total.std() < 2.3)
    True
    """
    _ADD_NOISE(x, std, stream, secure_rounding, first)
    # The eager path passes by the dispatcher, which would have counted the write.
    torch.autograd.graph.increment_version(x)
    return x


def _reference_add_noise_group(
    xs: Sequence[torch.Tensor], stds: Sequence[float], drawn: torch.Tensor, secure_rounding: bool, firsts: Sequence[int]
) -> None:
    for x, std, position, first in zip(xs, stds, drawn.unbind(), firsts):
        _ADD_NOISE.on(x.device.type, x, std, position, secure_rounding, first)


def _check_add_noise_group(
    xs: Sequence[torch.Tensor], stds: Sequence[float], drawn: torch.Tensor, secure_rounding: bool, firsts: Sequence[int]
) -> None:
    if not xs or not len(xs) == len(stds) == len(drawn) == len(firsts):
        sizes = f"{len(xs)} xs, {len(stds)} stds, {len(drawn)} positions and {len(firsts)} firsts"
        raise ValueError(f"there are {sizes}: give as many of each, at least one")
    check_positions(drawn, len(xs))
    # The largest of each dtype and layout, with the least and the most noise, stands for all.
    ends = sorted([(first + x.numel(), at) for at, (x, first) in enumerate(zip(xs, firsts))])
    for at in {(xs[at].dtype, xs[at].layout): at for _, at in ends}.values():
        for std in {min(stds), max(stds)}:
            _check_noised(xs[at], std, secure_rounding, min(0, *firsts) or firsts[at])


_ADD_NOISE_GROUP = Op(
    "add_noise_group_(Tensor(a!)[] xs, float[] stds, Tensor drawn, bool secure_rounding, int[] firsts) -> ()",
    reference=_reference_add_noise_group,
    fake=lambda xs, stds, drawn, secure_rounding, firsts: None,
    check=_check_add_noise_group,
)
_ADD_NOISE_GROUP.implement("cuda", _ADD_NOISE_GROUP.reference)


def add_noise_group_(
    xs: Sequence[torch.Tensor],
    stds: Sequence[float],
    drawn: torch.Tensor,
    *,
    secure_rounding: bool = True,
    firsts: Sequence[int] | None = None,
) -> None:
    """`add_noise_` to k tensors in place, at the positions int32 [k, 12] that ``NoiseStream.take_at`` claimed for them.

    By default each tensor is the whole that its position is of.
    """
    _ADD_NOISE_GROUP(list(xs), list(stds), drawn, secure_rounding, [0] * len(xs) if firsts is None else list(firsts))
    torch.autograd.graph.increment_version(xs)


# On processors: csrc/noise.cpp.


@_ADD_NOISE.on_cpu
def _add_noise_on_cpu(
    x: torch.Tensor, std: float, position: torch.Tensor, secure_rounding: bool, first: int = 0
) -> None:
    _add_noise_group_on_cpu([x], [std], position.unsqueeze(0), secure_rounding, [first])


@_ADD_NOISE_GROUP.on_cpu
def _add_noise_group_on_cpu(
    xs: Sequence[torch.Tensor], stds: Sequence[float], drawn: torch.Tensor, secure_rounding: bool, firsts: Sequence[int]
) -> None:
    dense = [x.contiguous() for x in xs]
    # Without noise nothing is rounded either.
    every = [
        (x.data_ptr(), NOISE_DTYPES[x.dtype], first, x.numel() if std else 0, std)
        for x, std, first in zip(dense, stds, firsts)
    ]
    _native.add_noise_group(every, drawn.contiguous(), secure_rounding, native_threads())
    for x, made in zip(xs, dense):
        if made is not x:
            x.copy_(made)
