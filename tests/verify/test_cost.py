"""What verification costs: rows and calls of a first step, and lines that somebody must read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import house, workloads

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("rows", "most"), [(1, 8.0), (8, 4.0)])
def test_a_first_step_runs_few_rows(rows: int, most: float) -> None:
    """Rows of the first block, forward and back, over those of the batch; a backward pass takes two forward passes' time."""
    case = workloads.Case("gpt2", 2, 16, vocabulary=50, rows=rows, tokens=16)
    model: Any = workloads.build(case, torch.device("cpu"))
    passed = []

    def forward(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        passed.append(output.shape[0])
        if output.requires_grad:
            output.register_hook(lambda gradient: passed.append(2 * gradient.shape[0]))

    model.transformer.h[0].mlp.register_forward_hook(forward)
    step: Any = workloads.private_step(case, model, fused=False, self_check=True)
    step()
    step.private.detach()
    assert step.private.route == "uses"
    assert 1.0 < sum(passed) / (3 * rows) <= most


def test_the_committed_figures_are_within_their_bars() -> None:
    found = json.loads((ROOT / "bench" / "results" / "cpu" / "verification.json").read_text())["figures"]
    assert found["gpt2 12x768, B=8, T=128"]["first_step_over_plain"] <= 4
    assert all(own["checks_share_of_steady_step"] <= 0.01 for name, own in found.items() if "gpt2 12x" in name)


def test_a_first_step_takes_few_calls_of_the_library() -> None:
    name = "calls in the first step"
    assert 1000 < house.steps()[name] <= house.GOALS[name]


@pytest.mark.parametrize(("room", "most"), [("verify", 1400), ("engine", 9000)])
def test_the_rooms_are_small(room: str, most: int) -> None:
    lines = sum(path.read_text().count("\n") for path in (ROOT / "fastdp" / room).rglob("*.py"))
    assert 0 < lines <= most
