"""Tables that a stopped suite goes on from."""

import json

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


def test_processes_share_a_suite_by_words_of_rows_and_by_seeds(tmp_path):
    """No row is there twice, and the first seed of everything comes first."""

    class Bench:
        def __init__(self, size):
            self.size = size

        def run(self, row):
            return {"figure": self.size}

    def settings(bench, seeds):
        rows = [{"scheme": "typed", "clients": n} for n in (4, 16, 4)] + [{"scheme": "none", "clients": 4}]
        return by_seed(rows, seeds)

    path = tmp_path / "t.json"
    options = ["--only", "typed 4,none", "--first-seed", "1", "--seeds", "3", "--json", str(path)]
    main("A suite.", {"default": 1, "tiny": 2}, Bench, settings, {}, options)
    found = [(row["scheme"], row["clients"], row["seed"], row["figure"]) for row in Table(path).rows]
    assert found == [(scheme, 4, seed, 1) for seed in (1, 2) for scheme in ("typed", "none")]


def test_half_of_the_pairs_are_of_one_row():
    meanings, references = ["a", "a", "b", "b"], ["1", "2", "3", "4"]
    pairs, labels = matched_pairs(meanings, references)
    assert labels == [0, 1, 0, 1]
    assert pairs == [("b", "1"), ("a", "2"), ("a", "3"), ("b", "4")]
