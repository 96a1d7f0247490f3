"""Every attack fails against fastdp, and succeeds once what holds it is switched off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fastdp.bench.attacks import run
from fastdp.bench.attacks.kit import ATTACKS, Attack

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_fails_and_succeeds_without_protection(name: str) -> None:
    outcome = run.run(ATTACKS[name])
    assert run.is_held(outcome), outcome
    outcome = run.run(ATTACKS[name], unprotected=True)
    assert outcome["verdict"] == "moved", outcome
    assert not run.is_held(outcome), outcome


def test_each_attack_says_what_it_shows_in_one_sentence() -> None:
    for attack in ATTACKS.values():
        assert attack.shows.endswith("."), attack.name
        assert ". " not in attack.shows, attack.name
        assert 4 < len(attack.shows.split()) <= 25, attack.name


def test_a_crash_is_no_refusal() -> None:
    def crash(library: Any) -> float:
        return float(torch.zeros(2) @ torch.zeros(3))

    def fail(library: Any) -> float:
        raise ValueError("not the library's")

    for attack in (crash, fail):
        outcome = run.run(Attack("attack", "data", "", attack, {}, {}, {}))
        assert outcome["verdict"] == "crashed"
        assert not run.is_held(outcome)


def test_the_page_shows_the_committed_outcomes() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "attacks.json").read_text())["figures"]["attacks"]
    assert [row["attack"] for row in rows] == list(ATTACKS)
    assert all(row["shows"] == ATTACKS[row["attack"]].shows for row in rows)
    assert all(map(run.is_held, rows))
    assert run.table(rows) in (ROOT / "docs" / "attacks.md").read_text()


def test_a_file_keeps_the_rows_of_attacks_that_are_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "attacks.json"
    rows: list[dict[str, Any]] = [{"attack": name} for name in ("no_longer_there", "tied_table", "huge_record")]
    path.write_text(json.dumps({"figures": {"attacks": rows}}))
    again = {"attack": "tied_table", "verdict": "refused"}
    assert run.merged(path, [again]) == [rows[2], again]
    assert run.merged(None, [again]) == [again]
