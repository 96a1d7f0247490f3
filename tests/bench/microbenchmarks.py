"""Every op and its alternatives under pytest-benchmark, one group an op; run by `make bench`, not by the test suite.

    python -m pytest tests/bench/microbenchmarks.py --benchmark-only

Sizes are small unless FASTDP_BENCH_SIZES names others. An op whose result is wrong fails before it is timed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from fastdp.bench import kernels

SIZES = kernels.SIZES[os.environ.get("FASTDP_BENCH_SIZES", "small")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Compiled formulas take the compiler longer than all the rest together: `fastdp bench kernels` times them.
TIMED = [
    (case.op, name)
    for case in kernels.cases(DEVICE, kernels.SIZES["small"])
    for name in ("fastdp", *case.alternatives)
    if name != "torch.compile"
]


@pytest.fixture(scope="module")
def cases() -> dict[str, kernels.Case]:
    """The case asked for last; others let go of their inputs."""
    return {}


@pytest.fixture
def case(op: str, cases: dict[str, kernels.Case]) -> kernels.Case:
    """The case of an op, whose result is right."""
    if op not in cases:
        cases.clear()
        cases[op] = next(case for case in kernels.cases(DEVICE, SIZES, op) if case.op == op)
        error, allowed = cases[op].check()
        assert error <= allowed, f"{op}: error {error:.3g}; no speed is reported for a wrong result"
    return cases[op]


@pytest.fixture(autouse=True)
def _without_autograd() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("op", "name"), TIMED, ids=[f"{op}: {name}" for op, name in TIMED])
def test_speed(op: str, name: str, case: kernels.Case, benchmark) -> None:
    benchmark.group = f"{op}, {case.size}"
    benchmark.extra_info.update(flops=case.flops, bytes=case.bytes)
    function = case.run if name == "fastdp" else case.alternatives[name]

    def call() -> None:
        function()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark(call)
