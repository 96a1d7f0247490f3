"""Rows and learning rates as all suites share them."""

import json
import math
from functools import partial

import pytest
from hypothesis import given, strategies as st

pytest.importorskip("matplotlib")

from fastdp.bench.utility.suite import Table, interior, measure, merge, parser_of

from tests.cases import cases


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


def _squares(path, shard, *, broken=None):
    def run(number):
        return {"figure": number**2 if number != broken else 1 // 0}

    rows = (({"number": number}, partial(run, number)) for number in range(7))
    return measure(Table(path), rows, shard=shard, skip=broken is not None)


def test_shards_share_the_rows_and_are_merged_to_all_of_them(tmp_path):
    """Three processes' tables, each with what it measured last; a row of two tables comes once."""
    shards = [tmp_path / f"{index}.json" for index in range(3)]
    for index, path in enumerate(shards):
        assert _squares(path, (index, 3))
    assert [row["number"] for row in Table(shards[1]).rows] == [1, 4]
    merge(tmp_path / "all.json", [*shards, shards[0]])
    assert sorted(row["figure"] for row in Table(tmp_path / "all.json").rows) == [number**2 for number in range(7)]
    everything = json.loads((tmp_path / "all.json").read_text())
    assert everything["environment"] == json.loads(shards[0].read_text())["environment"]


def test_shards_of_different_machines_are_not_merged(tmp_path):
    _squares(tmp_path / "here.json", (0, 2))
    there = json.loads((tmp_path / "here.json").read_text())
    there["environment"]["device"] = "another"
    (tmp_path / "there.json").write_text(json.dumps(there))
    with pytest.raises(ValueError, match="different environments"):
        merge(tmp_path / "all.json", [tmp_path / "here.json", tmp_path / "there.json"])


def test_a_row_that_fails_is_left_out_of_the_others_or_ends_the_suite(tmp_path, capsys):
    _squares(tmp_path / "some.json", (0, 1), broken=2)
    assert [row["number"] for row in Table(tmp_path / "some.json").rows] == [0, 1, 3, 4, 5, 6]
    assert "ZeroDivisionError" in capsys.readouterr().out
    with pytest.raises(ZeroDivisionError):
        measure(Table(None), [({"number": 0}, lambda: {"figure": 1 // 0})])


@cases("shard", ["2/2", "/2", "1", "a/b", "1/0"])
def test_a_shard_that_is_none_is_refused(shard, capsys):
    with pytest.raises(SystemExit):
        parser_of("A suite.", {"default": None}).parse_args(["--shard", shard])
    assert "give I/N" in capsys.readouterr().err
