"""Numbers that the host knows, as tensors of a device: made once, and sent without waiting."""

from __future__ import annotations

import functools

import torch

from fastdp.ops.placed import held, placed


def sent(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A vector of these numbers, the same tensor for the same numbers: never to be written.

    The copy is queued. One that blocks, as ``torch.tensor(..., device=...)`` makes, waits for all that the device has to do.
    """
    return held(_sent(numbers, dtype, device))


@functools.lru_cache(maxsize=512)
def _sent(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return placed(torch.tensor(numbers, dtype=dtype), device)
