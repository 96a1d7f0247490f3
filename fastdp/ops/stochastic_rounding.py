"""Float32 numbers kept in bfloat16, rounded up or down at random so that on average nothing is lost.

An average that moves by less than half of bfloat16's last place (2^-9 of it) stays where it is if it is rounded to nearest:
with a decay of .999 a second moment can then grow but never shrink. The random bits are a hash of where a number stands and
of the step, no secret: what is rounded was released before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_WORD = (1 << 32) - 1
#: Multipliers of the hash: of an element's number, of a tensor's and of a step's, and between its two shifts (kernels/adamw.py).
ELEMENT_FACTOR, TENSOR_FACTOR, STEP_FACTOR, MIX_FACTOR = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x7FEB352D


def random_bits(count: int, tensor: int, step: int, device: torch.device, first: int = 0) -> torch.Tensor:
    """32 bits for each element from ``first`` on, int64: the upper sixteen for one number of it, the lower for another."""
    x = torch.arange(first, first + count, device=device) * ELEMENT_FACTOR + (
        tensor * TENSOR_FACTOR + step * STEP_FACTOR
    ) % (1 << 32)
    x = x & _WORD
    x = ((x ^ (x >> 15)) * MIX_FACTOR) & _WORD
    return x ^ (x >> 16)


def round_to_bfloat16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Float32 ``x`` in bfloat16, up with the probability that its distance from below says; ``bits`` int64, sixteen an element.

    Infinities and NaN stay what they are.
    """
    words = (x.contiguous().view(torch.int32).long() & _WORD) + bits.view(x.shape)
    upper = (words >> 16) & 0xFFFF
    rounded = torch.where(upper >= 0x8000, upper - 0x10000, upper).to(torch.int16).view(torch.bfloat16)
    return torch.where(x.isnan(), x.to(torch.bfloat16), rounded)


@contextlib.contextmanager
def float32_moments(
    exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, place: Iterable[Any], first: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both moments in float32 for an update; afterwards those in bfloat16 hold it, rounded at random.

    ``place`` is the number of the tensor and that of the step, which say the random bits; ``first`` is where the moments begin in
    the tensor.
    """
    if exp_avg.dtype == torch.float32:
        yield exp_avg, exp_avg_sq
        return
    mean, square = exp_avg.float(), exp_avg_sq.float()
    yield mean, square
    tensor, step = (int(word) & _WORD for word in place)
    bits = random_bits(mean.numel(), tensor, step, mean.device, first)
    exp_avg.copy_(round_to_bfloat16(mean, bits >> 16))
    exp_avg_sq.copy_(round_to_bfloat16(square, bits & 0xFFFF))
