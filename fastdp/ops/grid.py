"""Noised sums rounded to a grid, exactly: what is released is a function of a real Gaussian release (docs/noise.md).

Floating-point noise on a floating-point sum has gaps that depend on the sum. An observer of the result can see which sums it
may have come from. Here the result is ``spacing * round(x / spacing + ratio * z)`` for the *real* number z that the words of
a position stand for. ``spacing`` is a public power of two, and ``ratio = std / spacing`` lies in [16, 32). Rounding a
Gaussian release is post-processing, so neither sensitivity nor noise multiplier change. The rounding itself adds
1 / (12 ratio^2), at most .033%, to the variance.

Every implementation decides the rounding from float32 normals where their error cannot reach the middle between two numbers
of the grid. For the others, some 3 in 10,000, it takes more digits of the same normal. So all give the same numbers, on every
device, for the same sum. They stop at 128 bits of the uniforms and 106 of the arithmetic: the result
then differs from the real one with a probability below `DISTANCE` an element.
"""

from __future__ import annotations

import decimal
import math
from decimal import Decimal

import numpy as np
import torch

from fastdp.ops.stream import chacha_words

#: Statistical distance of an element from its real counterpart, at most.
DISTANCE = 2.0**-85
_DIGITS = 60
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


def grid(std: float) -> tuple[float, float]:
    """(spacing, ratio) of the grid for noise of ``std``, which is rounded up to a float32: both are float32 numbers."""
    size = np.float32(std)
    if float(size) < std:
        size = np.nextafter(size, np.float32(np.inf))
    mantissa, exponent = math.frexp(float(size))
    return math.ldexp(1.0, exponent - 5), math.ldexp(mantissa, 5)


def exact_spacing(count: int, largest: float) -> float:
    """The smallest power of two such that float32 holds any sum of ``count`` of its multiples, each at most ``largest``.

    Such a sum is rounded nowhere, so that one summand moves it by exactly its own size.
    """
    _, exponent = math.frexp(max(count, 1) * largest)
    return math.ldexp(1.0, exponent - 24)


def on_grid(x: torch.Tensor, std: float, position: torch.Tensor, first: int = 0) -> torch.Tensor:
    """The definition: ``x`` with noise of ``std`` > 0, rounded to the grid; float32, of the shape of ``x``.

    Its elements are those from ``first`` on of the tensor that the position is of. Computed in float64 on the CPU, and in
    decimal numbers where that leaves a rounding open.
    """
    spacing, ratio = grid(std)
    values = x.detach().cpu().float().reshape(-1).numpy().astype(np.float64)
    steps = values / spacing
    divided = np.abs(steps) < 2.0**23  # a larger float32 is a multiple of the spacing already
    with np.errstate(invalid="ignore"):
        rest = np.where(divided, steps - np.rint(steps), 0.0)
    z, rough = _normals(position, values.size, first)
    y = rest + ratio * z
    moved = np.rint(y)  # grid steps that noise moves an element by
    with decimal.localcontext() as context:
        context.prec = _DIGITS
        for i in np.flatnonzero((np.abs(y - moved) > 0.5 - 2.0**-30) | rough):
            exact = Decimal(float(rest[i])) + Decimal(ratio) * exact_normal(position, first + int(i))
            moved[i] = float(exact.to_integral_value(decimal.ROUND_HALF_EVEN))
    whole = np.where(divided, np.rint(steps) * spacing, values).astype(np.float32)
    released = whole + (moved * spacing).astype(np.float32)
    return torch.from_numpy(released).reshape(x.shape).to(x.device)


def _normals(position: torch.Tensor, n: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Normals from 64 bits of each uniform, float64 [n]; and bool [n], where a tail needs more bits than these."""
    begin = first // 16
    blocks = -(-(first + n) // 16) - begin
    words, second = chacha_words(position, begin, blocks), chacha_words(position, begin, blocks, second=True)
    wide = (words.astype(np.uint64) << np.uint64(32)) | second
    radius = wide[:, :8]
    # Near 1 the logarithm is taken of the exact distance from 1.
    log = np.where(
        words[:, :8] >> np.uint32(31),
        np.log1p(-((~radius).astype(np.float64) + 0.5) / 2.0**64),
        np.log((radius.astype(np.float64) + 0.5) / 2.0**64),
    )
    turn = (wide[:, 8:].astype(np.int64).astype(np.float64) + 0.5) * (2.0 * np.pi / 2.0**64)
    size, top = np.sqrt(-2.0 * log), words[:, :8] >> np.uint32(16)
    rough = (top == 0) | (top == 0xFFFF)
    z = np.concatenate([size * np.cos(turn), size * np.sin(turn)], axis=1)
    both = np.concatenate([rough, rough], axis=1)
    return tuple(values.reshape(-1)[first - 16 * begin :][:n] for values in (z, both))  # type: ignore[return-value]


def exact_normal(position: torch.Tensor, index: int) -> Decimal:
    """The normal of element ``index`` from 128 bits of each uniform, to 50 digits."""
    block, k = index // 16, index % 8
    blocks = [
        chacha_words(position, first, 1, second)[0]
        for first, second in ((block, False), (block, True), (block + (1 << 31), True), (block + (1 << 31), False))
    ]
    with decimal.localcontext() as context:
        context.prec = _DIGITS
        u, turn = (
            (sum(int(words[at]) << 32 * (3 - c) for c, words in enumerate(blocks)) + Decimal("0.5")) / 2**128
            for at in (k, k + 8)
        )
        return (-2 * u.ln()).sqrt() * _cosine(2 * _PI * (turn - (Decimal("0.25") if index % 16 >= 8 else 0)))


def _cosine(x: Decimal) -> Decimal:
    """cos by its series, |x| <= 2 pi."""
    total, term, n = Decimal(1), Decimal(1), 0
    while abs(term) > Decimal(10) ** -_DIGITS:
        n += 2
        term *= -x * x / (n * (n - 1))
        total += term
    return total
