"""What verification costs: rows and calls of a first step, and lines that somebody must read."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import house, verification
from bench.workloads import Case

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("rows", "most"), [(1, 8.0), (8, 4.0)])
def test_a_first_step_runs_few_rows(rows: int, most: float) -> None:
    found = verification.measure(Case("gpt2", 2, 16, vocabulary=50, rows=rows, tokens=16), 1)
    assert found["route"] == "uses"
    assert 1.0 < found["first_step_forward_backward_equivalents"] <= most


def test_a_first_step_takes_few_calls_of_the_library() -> None:
    name = "calls in the first step"
    assert 1000 < house.steps()[name] <= house.GOALS[name]


@pytest.mark.parametrize(("room", "most"), [("verify", 1400), ("engine", 9000)])
def test_the_rooms_are_small(room: str, most: int) -> None:
    lines = sum(path.read_text().count("\n") for path in (ROOT / "fastdp" / room).rglob("*.py"))
    assert 0 < lines <= most
