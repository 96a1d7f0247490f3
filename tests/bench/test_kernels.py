"""The microbenchmarks: every op has a case, and a wrong result gets no speed."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from fastdp.bench import kernels, micro
from typer.testing import CliRunner

from fastdp import ops
from fastdp.cli import app
from tests.cases import cases

CPU = torch.device("cpu")


def test_every_op_has_a_case():
    benched = {name.split(",")[0].split(" ")[0].removesuffix("_") for name in kernels.names()}
    public = {name for name, value in vars(ops).items() if inspect.isfunction(value)}
    # The ops of many tensors and of heads are timed by the step benchmark; the vectors are those that private_snap draws.
    elsewhere = {"choice_log_probabilities", "adamw_noise_steps", "instance_sqnorm_group", "instance_sum_group"}
    elsewhere |= {
        "weighted_sum_group",
        "affine_sums_group",
        "add_noise_group",
        "direct_norms",
        "cross_entropy_gradient",
    }
    assert benched == {name.removesuffix("_") for name in public} - elsewhere - {"dchi_vectors"}


def test_every_op_passes_its_check():
    for case in kernels.cases(CPU, kernels.SIZES["small"]):
        error, allowed = case.check()
        assert error <= allowed, case.op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_alternative_runs(dtype, monkeypatch):
    """Counts of tokens took matrices for batches of them, which ended the whole stage; a GPU's cases are of bfloat16."""
    monkeypatch.setattr(kernels, "_dtype", lambda device: dtype)
    with torch.no_grad():
        for case in kernels.cases(CPU, kernels.SIZES["small"]):
            for name in case.alternatives.keys() - {"torch.compile"}:
                case.alternatives[name]()
            if case.op == "token_counts":
                assert torch.equal(case.run(), case.alternatives["torch"]())


def test_an_op_that_raises_is_one_row(monkeypatch):
    def fail():
        raise IndexError("Dimension out of range\n(more)")

    def made(device, sizes, only=None):
        yield kernels.Case("first", "1", lambda: None, lambda: (0.0, 1e-5), {"torch": fail})
        yield kernels.Case("snap", "2", lambda: None, lambda: (0.0, 1e-5), {})

    monkeypatch.setattr(micro, "cases", made)
    _, first, second = micro.measure(1, sizes="small")
    assert first == {"op": "first", "size": "1", "failed": "IndexError: Dimension out of range"}
    assert second.keys() >= {"seconds", "share_of_floor"}


@cases("error", [1e-3, float("nan"), float("inf")])
def test_a_wrong_result_gets_no_speed(error):
    case = kernels.Case("made up", "", lambda: None, lambda: (error, 1e-5), {"torch": lambda: None})
    row = micro.measure_case(case, case.alternatives, 1, CPU, 1e9, 1e9)
    assert set(row) == {"op", "size", "failed"}


def test_figures_of_a_case():
    calls: list[str] = []
    case = kernels.Case(
        "made up",
        "",
        lambda: calls.append("own"),
        lambda: (0.0, 1e-5),
        {"torch": lambda: torch.zeros(1 << 16).exp_()},
        flops=1e3,
        bytes=2e3,
    )
    row = micro.measure_case(case, case.alternatives, 3, CPU, 1e9, 1e12)
    assert row["floor_seconds"] == 2e-6
    assert row["share_of_floor"] == pytest.approx(2e-6 / row["seconds"])
    assert row["flops_per_second"] == pytest.approx(1e3 / row["seconds"])
    assert row["speedup over torch"] > 1
    assert len(calls) > 5, "short calls are repeated within a turn"


def test_command_measures_and_writes(tmp_path):
    path = tmp_path / "kernels.json"
    arguments = ["bench", "kernels", "--only", "column", "--turns", "1", "--sizes", "small", "--no-compiled"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())
    assert {"device", "instruction_set", "threads", "versions", "commit"} <= set(written["environment"])
    floor, row = written["figures"]
    assert floor["op"] == "floor"
    assert row["op"] == "column_sums"
    assert "speedup over torch" in row
    assert "speedup over torch.compile" not in row


@pytest.mark.parametrize("option", [("--sizes", "huge"), ("--only", "nothing")])
def test_unknown_names_are_refused(option):
    result = CliRunner().invoke(app, ["bench", "kernels", *option])
    assert result.exit_code == 1
    assert "choose one of" in result.output
