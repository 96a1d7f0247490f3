"""What `make gpu` checks on a GPU, run on a processor: a right implementation meets every bound, a wrong one does not."""

from __future__ import annotations

import inspect
import os
import sys

import pytest
import torch
from fastdp.bench import gpu_check
from fastdp.bench.workloads import Case

from fastdp import ops
from tests.private.test_recording import record_on_a_processor


@pytest.fixture(scope="module")
def rows():
    return [
        row for name in gpu_check.GROUPS if name not in ("wide", "methods") for row in gpu_check.checks_of(name, "cpu")
    ]


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


@pytest.mark.slow
def test_recordings_are_checked(monkeypatch):
    """Where a processor runs a pass again in the place of a replay."""
    record_on_a_processor(monkeypatch)
    small = Case("gpt2", 1, 16, 16, 2, 2, 512, 32, 24, dropout=0.0, dtype=torch.float32)
    monkeypatch.setattr(gpu_check, "RECORDED", small)
    rows = list(gpu_check.checks(gpu_check.recording, "cpu"))
    assert len(rows) == 16
    assert [row for row in rows if not row["holds"]] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refuses_where_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 2
    assert capsys.readouterr().err.strip() == "this checks the kernels of a GPU, and there is none"


class Exit:
    """Ends the process that is given it."""

    def __reduce__(self):
        return os._exit, (1,)


def test_groups_have_processes_of_their_own():
    """One that dies is a failed check, and ends no other."""
    *others, last = sorted(gpu_check.rows((Exit(), "heads"), "cpu"), key=lambda row: row["holds"], reverse=True)
    assert len(others) == 3
    assert "BrokenProcessPool" in last["raised"]
