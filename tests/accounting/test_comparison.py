"""Certified figures never lie below what other libraries prove of the truth: a few random runs, and slowly many."""

import pytest

from tests.accounting import comparison

COUNT, MANY = 12, 200


@pytest.mark.parametrize("run", [run for run in comparison.runs(COUNT) if run.steps <= 10_000], ids=str)
def test_never_below_the_truth(run):
    row = comparison.compare(run)
    assert comparison.holds(row), row


def test_a_figure_below_the_truth_is_found():
    row = comparison.compare(comparison.Run(0.01, 1.0, 100, 1e-5))
    assert row["dp_accounting"] > 0.9 * row["ours"], "the lower bound says nothing"
    assert not comparison.holds({**row, "ours": 0.9 * row["ours"]})


@pytest.mark.slow
def test_never_below_the_truth_on_many_runs():
    wrong = [row for row in comparison.measure(MANY) if not row["holds"]]
    assert not wrong
