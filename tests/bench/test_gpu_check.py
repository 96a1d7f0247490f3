"""What `make gpu` checks on a GPU, run on a processor: a right implementation meets every bound, a wrong one does not."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fastdp.bench import gpu_check

from fastdp import ops

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows():
    return [row for group in gpu_check.VALUES for row in gpu_check.checks(group, "cpu")]


def test_bounds_hold_for_right_results(rows):
    assert [row for row in rows if not row["holds"]] == []


def test_every_op_is_checked(rows):
    names = {row["check"].split()[0].removesuffix("_") for row in rows}
    public = {name.removesuffix("_") for name, value in vars(ops).items() if inspect.isfunction(value)}
    assert public - {"choice_log_probabilities"} | {"clip_noise_backward"} <= names


@pytest.mark.parametrize("wrong", [lambda x: x * (1 + 1e-4), lambda x: x * float("nan"), lambda x: x + 1e-1])
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refuses_where_there_is_no_gpu():
    run = subprocess.run([sys.executable, "-m", "bench.gpu_check"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.strip() == "this checks the kernels of a GPU, and there is none"
