"""The planner's constants on this device, and what it predicts against what is measured."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import torch

from fastdp import ops
from fastdp.engine.planner import ROUTES, allowed, fit, plan, predicted_seconds

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
        chosen = plan(m, n, length, units, device=device)
        for route in ROUTES:
            if not allowed(route, m, n, length, units):
                continue
            times = [_seconds(route, left, right, offsets, device) for _ in range(turns + 1)][1:]
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


def _seconds(route: str, left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, device: torch.device) -> float:
    weights = torch.ones(left.shape[0], device=device)
    units = torch.ones(offsets.shape[0] - 1, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    if route == "instantiate":
        gradients = ops.per_unit(left, right, offsets)
        gradients.flatten(1).square().sum(1)
        torch.einsum("u,umn->mn", units, gradients)
    else:
        ops.sqnorm(left, right, offsets, route)
        ops.weighted_sum(left, right, weights)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun
