"""What `make gpu` checks on a GPU, run on a processor: a right implementation meets every bound, a wrong one does not."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fastdp.bench import gpu_check, variants
from fastdp.bench.workloads import Case

from fastdp import ops
from tests.bench import compiling
from tests.private.test_recording import record_on_a_processor

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows():
    return [row for group in gpu_check.VALUES for row in gpu_check.checks(group, "cpu")]


def test_bounds_hold_for_right_results(rows):
    assert [row for row in rows if not row["holds"]] == []


def test_every_op_is_checked(rows):
    names = {row["check"].split()[0].removesuffix("_") for row in rows}
    public = {name.removesuffix("_") for name, value in vars(ops).items() if inspect.isfunction(value)}
    # The engine's steps run the ops of many tensors.
    many = {
        "affine_sums_group",
        "instance_sqnorm_group",
        "instance_sum_group",
        "weighted_sum_group",
        "adamw_noise_steps",
        "add_noise_group",
        "direct_norms",
    }
    assert public - {"choice_log_probabilities"} - many | {"clip_noise_backward", "engine,"} <= names


def last_unit_off(x):
    return torch.cat([x[..., :-1], 1.001 * x[..., -1:]], -1)


@pytest.mark.parametrize("wrong", [lambda x: x * (1 + 1e-4), lambda x: x * float("nan"), last_unit_off])
def test_wrong_results_are_found(wrong, monkeypatch):
    right = ops.abs_sum
    monkeypatch.setattr(ops, "abs_sum", lambda *args: wrong(right(*args)))
    failed = next(row for row in gpu_check.checks(gpu_check.norms, "cpu") if not row["holds"])
    assert failed["check"].startswith("abs_sum")


def test_a_kernel_that_raises_is_a_failed_check(monkeypatch):
    monkeypatch.setattr(ops, "snap", lambda x, table: 1 / 0)
    (row,) = gpu_check.checks(gpu_check.snapping, "cpu")
    assert not row["holds"]
    assert "ZeroDivisionError" in row["raised"]


def test_recordings_are_checked(monkeypatch):
    """Where a processor runs a pass again in the place of a replay."""
    record_on_a_processor(monkeypatch)
    small = Case("gpt2", 1, 16, 16, 2, 2, 512, 32, 24, dropout=0.0, dtype=torch.float32)
    monkeypatch.setattr(gpu_check, "RECORDED", small)
    rows = list(gpu_check.checks(gpu_check.recording, "cpu"))
    assert len(rows) == 16
    assert [row for row in rows if not row["holds"]] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refuses_where_there_is_no_gpu():
    run = subprocess.run([sys.executable, "-m", "bench.gpu_check"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.strip() == "this checks the kernels of a GPU, and there is none"


def test_the_schedule_on_a_mock_device(monkeypatch):
    """What is compiled is few and known beforehand; the engine's checks come first and wait for their own kernels alone."""
    pytest.importorskip("triton")
    begun, asked = [], []

    @contextlib.contextmanager
    def compiling(processes, modules):
        def begin(found):
            begun.extend(found)
            return (asked.append(variant) or (variant.kernel.fn.__name__, 0.0, None) for variant in found)

        yield begin

    monkeypatch.setattr(gpu_check, "compiling", compiling)
    rows = gpu_check.rows(4, "meta")
    assert next(rows) | {"waited_seconds": 0} == {
        "check": "kernels of engine compiled",
        "holds": True,
        "variants": len(asked),
        "waited_seconds": 0,
        "raised": [],
    }
    assert next(rows)["check"] == "engine"
    assert 0 < len(asked) < len(begun)
    assert {v.kernel.fn.__module__.rpartition(".")[2] for v in asked} >= {"weighted", "gram", "groups"}
    assert {v.kernel.fn.__module__.rpartition(".")[2] for v in begun} >= {
        "weighted",
        "gram",
        "direct",
        "adamw",
        "groups",
    }
    last = list(rows)[-1]
    assert last["check"] == "kernels of steps compiled"
    assert last["variants"] > 0
    assert len(begun) == len(asked) <= 86


def test_variants_are_compiled_by_processes_that_share_a_cache():
    """A kernel that does not compile is a row with its reason, and holds up none of the others."""
    arguments = (torch.empty(3, device="meta"), 7, None)
    kernels = (compiling.k0, compiling.k1, compiling.k2, compiling.k3, compiling.k4)
    found = [variants.Variant(kernel, arguments, {}) for kernel in kernels]
    with variants.compiling(2) as begin:
        done = {name: error for name, _, error in begin(found)}
    assert done.keys() == {f"k{i}" for i in range(5)}
    assert [name for name, error in done.items() if error] == ["k2"]
    assert "no such instruction" in done["k2"]
