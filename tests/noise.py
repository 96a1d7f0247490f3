"""Replacements of the ops that add noise to sums, for tests of noise that is at fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from fastdp import ops
from fastdp.ops import add_noise_group_
from fastdp.ops.stream import Draw, NoiseStream

#: ``add(x, std)`` adds the noise of the claimed position to ``x``, by the correct op.
Add = Callable[[torch.Tensor, float], None]


def noise_ops(draw: Callable[[torch.Tensor, float, Add], None]) -> dict[str, Callable[..., Any]]:
    """`add_noise_` and `add_noise_group_` of which each calls ``draw(total, std, add)`` once for each tensor."""

    def group(
        xs: Sequence[torch.Tensor],
        stds: Sequence[float],
        drawn: torch.Tensor,
        *,
        firsts: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        for x, std, position, first in zip(xs, stds, drawn.split(1), firsts or [0] * len(xs), strict=True):
            draw(x, std, partial(_add, position, first, options))

    def single(
        x: torch.Tensor, std: float, stream: NoiseStream | Draw, *, first: int = 0, **options: Any
    ) -> torch.Tensor:
        draw(x, std, partial(_add, stream.take().unsqueeze(0), first, options))
        return x

    return {"add_noise_": single, "add_noise_group_": group}


def replace_noise(monkeypatch: pytest.MonkeyPatch, draw: Callable[[torch.Tensor, float, Add], None]) -> None:
    """Put ``draw`` in the place of both ops, until the test ends."""
    for name, op in noise_ops(draw).items():
        monkeypatch.setattr(ops, name, op)


def _add(position: torch.Tensor, first: int, options: dict[str, Any], x: torch.Tensor, std: float) -> None:
    add_noise_group_([x], [std], position, firsts=[first], **options)
