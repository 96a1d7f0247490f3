"""Microbenchmarks of the ops: time, rate and share of the floor, beside the alternatives, after a check.

Every case first compares the op with its definition; a case that fails this check, or raises, reports that and no speed.
The op and its alternatives then run in turn, and ratios are medians over the turns, so that a machine whose speed drifts is
compared with itself. The floor is the larger of bytes over the copy bandwidth and operations over the matmul rate, both measured
in the same run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from fastdp.validate import first_line

from .kernels import SIZES, Case, Function, cases, names

#: Calls shorter than this are repeated within a turn.
_TURN_SECONDS = 2e-3


def measure(
    turns: int = 7, only: str | None = None, sizes: str | None = None, compiled: bool = True
) -> Iterator[dict[str, Any]]:
    """Floors first, then one row a case: seconds, rate, share of the floor, speedups over the alternatives.

    Args:
        turns: how often each is timed; a turn repeats short calls.
        only: measure only ops whose name holds this.
        sizes: a name in ``SIZES``; by default that of the device.
        compiled: whether alternatives that take a compiler half a minute are measured.

    Raises:
        ValueError: unknown sizes, or no op of this name.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = sizes or device.type
    if sizes not in SIZES:
        raise ValueError(f"there are no sizes '{sizes}'; choose one of {', '.join(SIZES)}")
    if only is not None and not names(only):
        raise ValueError(f"there is no op '{only}'; choose one of {', '.join(names())}")
    bandwidth, matmul = floors(device, small=sizes == "small")
    yield {"op": "floor", "device": str(device), "copy_bytes_per_second": bandwidth, "matmul_flops_per_second": matmul}
    for case in cases(device, SIZES[sizes], only):
        alternatives = {k: f for k, f in case.alternatives.items() if compiled or k != "torch.compile"}
        try:
            with torch.no_grad():
                yield measure_case(case, alternatives, turns, device, bandwidth, matmul)
        except Exception as error:
            yield {"op": case.op, "size": case.size, "failed": f"{type(error).__name__}: {first_line(error)}"}


def measure_case(
    case: Case, alternatives: dict[str, Function], turns: int, device: torch.device, bandwidth: float, matmul: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"op": case.op, "size": case.size}
    error, allowed = case.check()
    if not error <= allowed:
        row["failed"] = f"error {error:.3g} exceeds {allowed:.3g}: no speed is reported for a wrong result"
        return row
    row["error"] = error
    functions = {"fastdp": case.run, **alternatives}
    repeats: dict[str, int] = {}
    for name, function in functions.items():
        seconds_of(function, device)  # compiles, loads, allocates
        repeats[name] = max(1, math.ceil(_TURN_SECONDS / max(seconds_of(function, device), 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(turns):
        for name, function in functions.items():
            times[name].append(seconds_of(function, device, repeats[name]))
    own = times["fastdp"]
    row["seconds"] = statistics.median(own)
    floor = max(case.bytes / bandwidth, case.flops / matmul)
    row["floor_seconds"] = floor
    row["share_of_floor"] = floor / row["seconds"]
    row["bytes_per_second"] = case.bytes / row["seconds"]
    row["flops_per_second"] = case.flops / row["seconds"]
    for name, other in times.items():
        if name != "fastdp":
            row[f"speedup over {name}"] = statistics.median(b / a for a, b in zip(own, other))
    return row


def seconds_of(function: Function, device: torch.device, repeats: int = 1) -> float:
    """Mean of so many calls in a row."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats
    begun = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - begun) / repeats


def floors(device: torch.device, small: bool = False) -> tuple[float, float]:
    """Copy bandwidth in bytes a second (read and written), and float32 matmul rate (bfloat16 on a GPU)."""
    big = torch.empty(1 << (28 if device.type == "cuda" else 16 if small else 25), device=device)
    other = torch.empty_like(big)
    copy = statistics.median(seconds_of(lambda: other.copy_(big), device) for _ in range(7))
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (128 if small else 1536, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = statistics.median([seconds_of(lambda: a @ b, device) for _ in range(8)][1:])
    return 2 * big.numel() * 4 / copy, 2 * size**3 / product
