"""The planner's constants on this device, and what it predicts against what is measured."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from fastdp import ops
from fastdp.ops.routes import (
    ENTRY_TOKENS,
    GRAM_BLOCK,
    ROUTES,
    RouteConstants,
    is_allowed,
    plan_route,
    predicted_seconds,
)

from .micro import seconds_of

#: (m, n, tokens a unit, units): layers of the step benchmark, long and short units, LoRA's factors.
SHAPES = [
    (512, 512, 16, 8),
    (512, 512, 128, 8),
    (1536, 512, 128, 8),
    (2048, 512, 128, 8),
    (512, 2048, 128, 8),
    (8192, 512, 128, 8),
    (384, 384, 197, 8),
    (1536, 384, 197, 8),
    (512, 512, 512, 4),
    (512, 512, 1024, 2),
    (2, 384, 128, 8),
    (4, 512, 128, 8),
    (512, 4, 128, 8),
]


def measure(turns: int = 5) -> dict[str, Any]:
    """Fitted constants, and for each shape and route the predicted and the measured seconds of norms and weighted sum."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    constants = fit(device)
    rows = []
    for m, n, length, units in SHAPES:
        left, right = torch.randn(units * length, m, device=device), torch.randn(units * length, n, device=device)
        offsets = torch.arange(units + 1, device=device) * length
        chosen = plan_route(m, n, length, units, device=device)
        for route in ROUTES:
            if not is_allowed(route, m, n, length, units):
                continue
            run = functools.partial(_run, route, left, right, offsets, torch.ones(len(left), device=device))
            times = [seconds_of(run, device) for _ in range(turns + 1)][1:]
            rows.append(
                {
                    "m": m,
                    "n": n,
                    "tokens": length,
                    "units": units,
                    "route": route,
                    "chosen": route == chosen,
                    "predicted": predicted_seconds(route, m, n, length, units, constants=constants, device=device),
                    "measured": statistics.median(times),
                }
            )
    return {"constants": dataclasses.asdict(constants), "rows": rows}


def _run(route: str, left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> None:
    if route == "instantiate":
        gradients = ops.per_unit(left, right, offsets)
        gradients.flatten(1).square().sum(1)
        torch.einsum("u,umn->mn", weights[: len(gradients)], gradients)
    else:
        ops.sqnorm(left, right, offsets, route)
        ops.weighted_sum(left, right, weights)


def _least(work: Callable[[], object], device: torch.device, repeats: int = 15) -> float:
    """Least time of a few runs after one: what else the machine does only adds."""
    return min([seconds_of(work, device) for _ in range(1 + repeats)][1:])


def fit(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> RouteConstants:
    """Measure a device's constants, in about a second.

    Args:
        device: where to run.
        dtype: of the factors.

    Returns:
        Constants whose ``device`` names the device and the threads used.
    """
    device = torch.device(device)
    units, length, m, n = 2, 128, 512, 512  # a millisecond each: short enough to fall between other programs' turns
    if device.type == "cuda":
        units, length, m, n = 8, 1024, 4096, 4096
    generator = torch.Generator().manual_seed(0)

    def factor(tokens: int, columns: int) -> torch.Tensor:
        return torch.randn(tokens, columns, generator=generator).to(device, dtype)

    def offsets(count: int, each: int) -> torch.Tensor:
        return torch.arange(0, (count + 1) * each, each, device=device)

    left, right, bounds = factor(units * length, m), factor(units * length, n), offsets(units, length)
    tiny, tiny_bounds = factor(1, 1), offsets(1, 1)
    source = torch.zeros(1 << (24 if device.type == "cpu" else 28), device=device)
    target = torch.empty_like(source)
    call = _least(lambda: ops.sqnorm(tiny, tiny, tiny_bounds, "gram"), device, repeats=50)
    bandwidth = 2 * 4 * source.numel() / _least(lambda: target.copy_(source), device)
    flops = 2 * units * length * m * n

    def rate(work: Callable[[], object], flops: float) -> float:
        took = _least(work, device)  # of factors that lie in a cache by now, so their bytes are not taken off
        return flops / max(took - call, took / 2)

    return RouteConstants(
        device=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads",
        gram_flops=rate(
            lambda: ops.sqnorm(left, right, bounds, "gram"), units * length * (length + GRAM_BLOCK) * (m + n)
        ),
        direct_flops=rate(lambda: ops.sqnorm(left, right, bounds, "direct"), flops * (length + ENTRY_TOKENS) / length),
        product_flops=rate(lambda: torch.mm(left.T, right), flops),
        bandwidth=bandwidth,
        call_seconds=call,
    )
