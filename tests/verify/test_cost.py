"""What verification costs: rows and calls of a first step, and lines that somebody must read."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import house, verification

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("rows", "most"), [(1, 8.0), (8, 4.0)])
def test_a_first_step_runs_few_rows(rows: int, most: float) -> None:
    found = verification.measure(width=16, rows=rows, tokens=16, layers=2, vocabulary=50, steps=1)
    assert found["route"] == "uses"
    assert 1.0 < found["first_step_forward_backward_equivalents"] <= most


def test_a_first_step_takes_few_calls_of_the_library() -> None:
    name = "calls in the first step"
    assert 1000 < house.steps()[name] <= house.GOALS[name]


def test_the_room_is_small() -> None:
    lines = sum(path.read_text().count("\n") for path in (ROOT / "fastdp" / "verify").glob("*.py"))
    assert 0 < lines <= 1400
