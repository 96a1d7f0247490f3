"""Microbenchmarks of the ops: time, rate, share of the floor, peak memory, beside the alternatives, after a check.

Every case first compares the op with its definition; a case whose check fails reports that and no speed. The op and its
alternatives then run in turn, and ratios are medians over the turns, so that a machine whose speed drifts is compared
with itself. The floor is the larger of bytes over the copy bandwidth and operations over the matmul rate, both measured
in the same run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastdp import ops
from fastdp.ops.table import OPS

Function = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Args:
        run: the op.
        check: relative error of the op against its definition, and the largest that is allowed.
        alternatives: other ways to the same result, by name.
        flops, bytes: the least arithmetic and memory traffic that the result takes.
    """

    op: str
    size: str
    run: Function
    check: Callable[[], tuple[float, float]]
    alternatives: dict[str, Function]
    flops: float = 0.0
    bytes: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)


def measure(turns: int = 7, only: str | None = None, device: str | None = None) -> list[dict[str, Any]]:
    """One row a case: seconds, rate, share of the floor, peak bytes, and ratios to the alternatives (above 1: slower)."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    bandwidth, matmul = floors(where)
    rows: list[dict[str, Any]] = [
        {"op": "floor", "device": str(where), "copy_bytes_per_second": bandwidth, "matmul_flops_per_second": matmul}
    ]
    for case in cases(where):
        if only is None or only in case.op:
            rows.append(_measure(case, turns, where, bandwidth, matmul))
    return rows


def _measure(case: Case, turns: int, device: torch.device, bandwidth: float, matmul: float) -> dict[str, Any]:
    row: dict[str, Any] = {"op": case.op, "size": case.size}
    error, allowed = case.check()
    if not error <= allowed:
        row["failed"] = f"error {error:.3g} exceeds {allowed:.3g}: no speed is reported for a wrong result"
        return row
    row["error"] = error
    functions = {"fastdp": case.run, **case.alternatives}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(turns + 1):
        for name, function in functions.items():
            seconds = _seconds(function, device)
            if turn:
                times[name].append(seconds)
    own = times["fastdp"]
    row["seconds"] = statistics.median(own)
    row["peak_bytes"] = peak_bytes(case.run, device)
    floor = max(case.bytes / bandwidth, case.flops / matmul)
    row["floor_seconds"] = floor
    row["share_of_floor"] = floor / row["seconds"]
    row["bytes_per_second"] = case.bytes / row["seconds"]
    row["flops_per_second"] = case.flops / row["seconds"]
    for name, other in times.items():
        if name != "fastdp":
            row[f"speedup over {name}"] = statistics.median(b / a for a, b in zip(own, other))
    row.update(case.notes)
    return row


def _seconds(function: Function, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def peak_bytes(function: Function, device: torch.device) -> int | None:
    """Memory a call takes above its start, its result included; None where the system does not tell."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = function()
        del kept
        return torch.cuda.max_memory_allocated() - before
    try:
        # Linux: 5 sets the process's high-water mark back to what it holds now.
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        kept = function()
        del kept
        return max(0, _status("VmHWM") - before)
    except OSError:
        return None


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def floors(device: torch.device) -> tuple[float, float]:
    """Copy bandwidth in bytes a second (read and written), and float32 matmul rate (bfloat16 on a GPU)."""
    big = torch.empty(1 << (28 if device.type == "cuda" else 25), device=device)
    other = torch.empty_like(big)
    copy = statistics.median(_seconds(lambda: other.copy_(big), device) for _ in range(7))
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1536, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = statistics.median([_seconds(lambda: a @ b, device) for _ in range(8)][1:])
    return 2 * big.numel() * 4 / copy, 2 * size**3 / product


def cases(device: torch.device) -> Iterator[Case]:
    """Every case, sized for the device."""
    torch.manual_seed(0)
    gpu = device.type == "cuda"
    yield from _noise(device, 1 << (28 if gpu else 24))
    yield from _norms(device, torch.bfloat16 if gpu else torch.float32, *((32, 1024) if gpu else (8, 128)))
    yield from _snap(device)


def _compiled(function: Callable[..., Any], *args: Any) -> Function:
    compiled = torch.compile(function)
    return lambda: compiled(*args)


def _relative(got: torch.Tensor, truth: torch.Tensor) -> float:
    gap = float((got.double() - truth.double()).norm())
    return gap / max(float(truth.double().norm()), 1e-300) if math.isfinite(gap) else math.inf


def _noise(device: torch.device, n: int) -> Iterator[Case]:
    stream = ops.NoiseStream()
    x = torch.zeros(n, device=device)
    scratch = torch.empty_like(x)

    def check_noise() -> tuple[float, float]:
        small = torch.zeros(4099, device=device)
        fixed = ops.NoiseStream.unsafe_reproducible(7)
        ops.add_noise_(small, 1.0, fixed)
        reference = torch.zeros(4099)
        OPS["add_noise_"].reference(reference, 1.0, ops.NoiseStream.unsafe_reproducible(7).take(), False)
        return _relative(small.cpu(), reference), 1e-5

    def plain(v: torch.Tensor) -> torch.Tensor:
        return v + torch.randn_like(v)

    yield Case(
        "add_noise_",
        f"{n} float32",
        lambda: ops.add_noise_(x, 1.0, stream),
        check_noise,
        {
            "torch normal_": lambda: scratch.normal_(),
            "torch randn and add_": lambda: x.add_(torch.randn_like(x)),
            "torch.compile": _compiled(plain, x),
        },
        bytes=8.0 * n,
    )

    state = [torch.randn(n, device=device).mul_(0.01) for _ in range(3)] + [torch.rand(n, device=device)]
    parameter = torch.nn.Parameter(torch.zeros(n, device=device))
    parameter.grad = state[1]
    fused = torch.optim.AdamW([parameter], lr=1e-4, fused=True)

    def own() -> None:
        weight, grad_sum, first, second = state
        ops.adamw_noise_step_(weight, grad_sum, first, second, 1.0, stream, divisor=256.0, lr=1e-4, step=10)

    def two() -> None:
        ops.add_noise_(state[1], 1.0, stream)
        fused.step()

    def check_step() -> tuple[float, float]:
        base = [torch.randn(1003, device=device) for _ in range(3)] + [torch.rand(1003, device=device)]
        got = [t.clone() for t in base]
        fixed = ops.NoiseStream.unsafe_reproducible(3)
        weight, grad_sum, first, second = got
        ops.adamw_noise_step_(
            weight, grad_sum, first, second, 0.5, fixed, divisor=8.0, lr=1e-2, step=4, weight_decay=0.01
        )
        noisy = base[1].clone()
        ops.add_noise_(noisy, 0.5, ops.NoiseStream.unsafe_reproducible(3))
        q = torch.nn.Parameter(base[0].clone())
        q.grad = noisy / 8.0
        check = torch.optim.AdamW([q], lr=1e-2, weight_decay=0.01)
        check.state[q] = {"step": torch.tensor(3.0), "exp_avg": base[2].clone(), "exp_avg_sq": base[3].clone()}
        check.step()
        return _relative(got[0], q.detach()), 1e-5

    yield Case(
        "adamw_noise_step_",
        f"{n} float32",
        own,
        check_step,
        {"add_noise_ and torch's fused AdamW": two},
        bytes=28.0 * n,
    )

    hidden = torch.randn(64, 128, 768, device=device)

    def composed(v: torch.Tensor) -> torch.Tensor:
        scale = (1.0 / v.flatten(1).norm(dim=1)).clamp(max=1.0).view(-1, 1, 1)
        return v * scale + 0.1 * torch.randn_like(v)

    def check_clip() -> tuple[float, float]:
        got = ops.clip_noise(hidden[:3], 1.0, 0.0, stream)
        truth = hidden[:3].double()
        return _relative(got, truth * (1.0 / truth.flatten(1).norm(dim=1)).clamp(max=1).view(-1, 1, 1)), 1e-6

    yield Case(
        "clip_noise",
        "64 x 128 x 768 float32",
        lambda: ops.clip_noise(hidden, 1.0, 0.1, stream),
        check_clip,
        {"torch": lambda: composed(hidden), "torch.compile": _compiled(composed, hidden)},
        bytes=12.0 * hidden.numel(),
    )


def _norms(device: torch.device, dtype: torch.dtype, units: int, length: int) -> Iterator[Case]:
    m, n = 2048, 512
    offsets = torch.arange(units + 1, device=device) * length
    tokens = units * length
    width = dtype.itemsize
    left, left2 = (torch.randn(tokens, m, device=device, dtype=dtype) for _ in range(2))
    right = torch.randn(tokens, n, device=device, dtype=dtype)
    weights = torch.rand(tokens, device=device)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2

    def batched(a: torch.Tensor) -> torch.Tensor:
        return a.view(units, length, -1)

    def full_gram(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x, y = batched(a), batched(b)
        return (torch.bmm(x, x.mT) * torch.bmm(y, y.mT)).sum((1, 2))

    def materialised(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.bmm(batched(a).mT, batched(b))

    def checked(name: str, got: Callable[[], torch.Tensor], *arguments: Any) -> Callable[[], tuple[float, float]]:
        def check() -> tuple[float, float]:
            exact = [_wider(a) for a in arguments]
            return _relative(got(), OPS[name].reference(*exact)), tolerance

        return check

    gram = float(units * length**2 * (m + n))
    factors = float(tokens * (m + n) * width)
    yield Case(
        "sqnorm",
        f"{units} x {length}, {m} x {n}",
        lambda: ops.sqnorm(left, right, offsets),
        checked("sqnorm", lambda: ops.sqnorm(left, right, offsets), left, right, offsets, "auto"),
        {
            "torch": lambda: full_gram(left, right),
            "torch.compile": _compiled(full_gram, left, right),
            **_opacus_norm(batched(left), batched(right)),
            "the layer's weight gradient": lambda: left.mT @ right,
        },
        flops=gram,
        bytes=factors,
    )
    yield Case(
        "sqnorm_group",
        f"2 of {units} x {length}, {m} x {n}",
        lambda: ops.sqnorm_group([left, left2], right, offsets),
        checked("sqnorm_group", lambda: ops.sqnorm_group([left, left2], right, offsets), [left, left2], right, offsets),
        {"two sqnorm": lambda: (ops.sqnorm(left, right, offsets), ops.sqnorm(left2, right, offsets))},
        flops=float(units * length**2 * (2 * m + n)),
        bytes=float(tokens * (2 * m + n) * width),
    )
    yield Case(
        "cross_inner",
        f"{units} x {length}, {m} x {n}",
        lambda: ops.cross_inner(left, right, left2, right, offsets, offsets),
        checked(
            "cross_inner",
            lambda: ops.cross_inner(left, right, left2, right, offsets, offsets),
            *(left, right, left2, right, offsets, offsets),
        ),
        {
            "torch": lambda: (
                torch.bmm(batched(left), batched(left2).mT) * torch.bmm(batched(right), batched(right).mT)
            ).sum((1, 2))
        },
        flops=2 * gram,
        bytes=float(tokens * 2 * (m + n) * width),
    )
    ids = torch.randint(0, 50, (tokens,), device=device)
    yield Case(
        "sqnorm of an embedding",
        f"{units} x {length}, {n}",
        lambda: ops.sqnorm(ids, right, offsets),
        checked("sqnorm", lambda: ops.sqnorm(ids, right, offsets), ids, right, offsets, "auto"),
        {
            "torch": lambda: (
                torch.bmm(batched(right), batched(right).mT) * (ids.view(units, -1, 1) == ids.view(units, 1, -1))
            ).sum((1, 2))
        },
        bytes=float(tokens * n * width),
    )
    yield Case(
        "weighted_sum",
        f"{tokens}, {m} x {n}",
        lambda: ops.weighted_sum(left, right, weights),
        checked("weighted_sum", lambda: ops.weighted_sum(left, right, weights), left, right, weights, None),
        {"torch": lambda: (left * weights.unsqueeze(1).to(dtype)).mT @ right, "unweighted": lambda: left.mT @ right},
        flops=2.0 * tokens * m * n,
        bytes=factors,
    )
    thin = torch.randn(tokens, 4, device=device, dtype=dtype)
    yield Case(
        "per_unit",
        f"{units} x {length}, 4 x {n}",
        lambda: ops.per_unit(thin, right, offsets),
        checked("per_unit", lambda: ops.per_unit(thin, right, offsets), thin, right, offsets),
        {
            "torch": lambda: torch.bmm(batched(thin).mT, batched(right)),
            "the layer's weight gradient": lambda: thin.mT @ right,
        },
        flops=8.0 * tokens * n,
        bytes=float(tokens * (n + 4) * width),
    )
    mask = torch.rand(m, n, device=device) < 0.5

    def torch_masked() -> torch.Tensor:
        square = materialised(left, right).float().square()
        return torch.stack([(square * mask).sum((1, 2)), (square * ~mask).sum((1, 2))])

    yield Case(
        "masked_sqnorm",
        f"{units} x {length}, {m} x {n}",
        lambda: ops.masked_sqnorm(left, right, offsets, mask),
        checked("masked_sqnorm", lambda: ops.masked_sqnorm(left, right, offsets, mask), left, right, offsets, mask),
        {"torch, materialised": torch_masked},
        flops=2.0 * tokens * m * n,
        bytes=factors,
    )
    yield Case(
        "abs_sum",
        f"{units} x {length}, {m} x {n}",
        lambda: ops.abs_sum(left, right, offsets),
        checked("abs_sum", lambda: ops.abs_sum(left, right, offsets), left, right, offsets),
        {"torch, materialised": lambda: materialised(left, right).float().abs().sum((1, 2))},
        flops=2.0 * tokens * m * n,
        bytes=factors,
    )


def _wider(value: Any) -> Any:
    if isinstance(value, list):
        return [_wider(v) for v in value]
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _opacus_norm(left: torch.Tensor, right: torch.Tensor) -> dict[str, Function]:
    from opacus.grad_sample.linear import compute_linear_norm_sample

    layer = torch.nn.Linear(right.shape[2], left.shape[2], bias=False, device=left.device, dtype=left.dtype)
    return {"Opacus's norm sampler": lambda: compute_linear_norm_sample(layer, [right], left)}


def _snap(device: torch.device) -> Iterator[Case]:
    vocabulary, width, rows = 50_257, 768, 1024
    stream = ops.NoiseStream()
    table = torch.randn(vocabulary, width, device=device)
    x = table[torch.randint(0, vocabulary, (rows,), device=device)] + torch.randn(rows, width, device=device)
    ids = torch.randint(0, vocabulary, (rows,), device=device)
    eta = 30.0

    def check_snap() -> tuple[float, float]:
        sample, small = x[:64].double(), table.double()
        distances = small.square().sum(1) - 2 * sample @ small.mT
        found = ops.snap(x[:64], table)
        best = distances.min(1).values
        gap = (distances.gather(1, found.unsqueeze(1)).squeeze(1) - best).clamp(min=0)
        return float((gap / best.abs().clamp(min=1)).max()), 1e-6

    flops = 2.0 * rows * vocabulary * width
    bytes_ = 4.0 * (vocabulary + rows) * width
    yield Case(
        "snap",
        f"{rows} of {vocabulary} x {width}",
        lambda: ops.snap(x, table),
        check_snap,
        {"torch.cdist and argmin": lambda: torch.cdist(x, table).argmin(1), "one matmul": lambda: x @ table.mT},
        flops=flops,
        bytes=bytes_,
    )

    def check_private() -> tuple[float, float]:
        # At a large eta the noise is far shorter than half the distance between rows: nothing may change.
        return float((ops.private_snap(ids, table, 1e6, stream) != ids).sum()), 0.0

    yield Case(
        "private_snap",
        f"{rows} of {vocabulary} x {width}, eta {eta:g}",
        lambda: ops.private_snap(ids, table, eta, stream),
        check_private,
        {"snap": lambda: ops.snap(x, table)},
        flops=flops,
        bytes=bytes_,
    )
    distinct = torch.randperm(vocabulary, device=device)[:2000]
    many = distinct[torch.randint(0, 2000, (100_000,), device=device)]
    queries = table[distinct] + 0.1

    def check_choice() -> tuple[float, float]:
        # At a large scale the nearest row, which is the token's own, takes all the probability.
        return float((ops.exponential_choice(many[:500], table, 1e4, stream) != many[:500]).sum()), 0.0

    yield Case(
        "exponential_choice",
        f"100000 ids, 2000 distinct, of {vocabulary} x {width}",
        lambda: ops.exponential_choice(many, table, 2.0, stream),
        check_choice,
        {"snap of the 2000": lambda: ops.snap(queries, table)},
        flops=2.0 * 2000 * vocabulary * width,
        bytes=bytes_,
    )
