"""Tables that a stopped suite goes on from."""

import json

import pytest
from fastdp.bench.utility.suite import Table, by_seed, main, measure
from fastdp.bench.utility.tops import matched_pairs


def squares(path, numbers, **options):
    measure(Table(path), ({"number": n} for n in numbers), lambda row: {"figure": row["number"] ** 2}, **options)
    return [row["figure"] for row in Table(path).rows]


def test_a_suite_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "table.json"
    assert squares(path, range(2)) == [0, 1]

    def run(row):
        assert row["number"] > 1, "a row is measured once"
        return {"figure": row["number"] ** 2}

    measure(Table(path), ({"number": n} for n in range(4)), run)
    assert [row["figure"] for row in Table(path).rows] == [0, 1, 4, 9]
    assert "commit" in json.loads(path.read_text())["environment"]


def test_a_suite_stops_when_its_time_is_up(tmp_path, capsys):
    assert squares(tmp_path / "table.json", range(3), minutes=0.0) == []
    assert "goes on from here" in capsys.readouterr().out


def test_rows_that_were_measured_stay_where_one_fails(tmp_path):
    with pytest.raises(ZeroDivisionError):
        measure(Table(tmp_path / "t.json"), [{"n": 1}, {"n": 0}], lambda row: {"figure": 1 / row["n"]})
    assert [row["figure"] for row in Table(tmp_path / "t.json").rows] == [1.0]


def test_only_rows_that_are_asked_for_are_measured(tmp_path):
    class Bench:
        def __init__(self, size):
            self.size = size

        def run(self, row):
            return {"figure": self.size}

    def settings(bench, seeds):
        return [{"form": "full"}, {"form": "lora"}] * (bench.size == seeds)

    path = tmp_path / "t.json"
    main(
        "A suite.",
        {"default": 7, "tiny": 8},
        Bench,
        settings,
        {},
        ["--only", "full", "--seeds", "7", "--json", str(path)],
    )
    assert [(row["form"], row["figure"]) for row in Table(path).rows] == [("full", 7)]


def test_processes_share_a_suite_by_words_of_rows_and_by_seeds(tmp_path):
    class Bench:
        def __init__(self, size):
            self.size = size

        def run(self, row):
            return {}

    def settings(bench, seeds):
        rows = [{"scheme": "typed", "clients": 4}, {"scheme": "typed", "clients": 16}, {"scheme": "none", "clients": 4}]
        return by_seed(rows, seeds)

    path = tmp_path / "t.json"
    options = ["--only", "typed 4,none", "--first-seed", "1", "--seeds", "2", "--json", str(path)]
    main("A suite.", {"default": 1, "tiny": 2}, Bench, settings, {}, options)
    assert [(row["scheme"], row["clients"], row["seed"]) for row in Table(path).rows] == [
        ("typed", 4, 1),
        ("none", 4, 1),
    ]


def test_half_of_the_pairs_are_of_one_row():
    meanings, references = ["a", "a", "b", "b"], ["1", "2", "3", "4"]
    pairs, labels = matched_pairs(meanings, references)
    assert labels == [0, 1, 0, 1]
    assert pairs == [("b", "1"), ("a", "2"), ("a", "3"), ("b", "4")]


def test_the_first_seed_of_everything_comes_first():
    found = by_seed([{"form": "a"}, {"form": "b"}, {"form": "a"}], 2)
    assert [(row["form"], row["seed"]) for row in found] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
