"""Rows and learning rates as all suites share them."""

import math

import pytest
from hypothesis import given, strategies as st

pytest.importorskip("matplotlib")

from fastdp.bench.utility.suite import Table, interior, measure


@given(st.integers(-6, 8), st.booleans())
def test_rates_go_on_until_the_best_is_no_edge(best, largest):
    """A figure with one optimum, wherever it lies: the rates tried reach one beyond it on both sides, or their number is up."""
    table, sign = Table(None), 1 if largest else -1

    def run(rate):
        return {"rate": rate, "seed": 0}, lambda: {"figure": -sign * abs(math.log2(rate) - best)}

    assert measure(table, interior(table, (1.0, 2.0, 4.0), run, "figure", largest=largest, most=20), 1.0)
    rates = sorted(row["rate"] for row in table.rows)
    chosen = (max if largest else min)(table.rows, key=lambda row: row["figure"])["rate"]
    assert chosen == 2.0**best
    assert rates[0] < chosen < rates[-1]


def test_rates_end_at_their_number_and_wait_for_what_is_missing():
    table = Table(None)
    assert measure(
        table,
        interior(table, (1.0, 2.0), lambda r: ({"rate": r}, lambda: {"figure": r}), "figure", largest=True, most=5),
        1.0,
    )
    assert [row["rate"] for row in table.rows] == [1.0, 2.0, 4.0, 8.0, 16.0]
    nothing = Table(None)
    assert len(list(interior(nothing, (1.0, 2.0), lambda r: ({"rate": r}, dict), "figure", largest=True))) == 2
