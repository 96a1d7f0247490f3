"""Every attack fails against fastdp: it is refused in one sentence, or moves the release by no more than the bound."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("opacus")

from fastdp.bench.attacks import kit, run, systems


class Unclipped(systems.FastDP):
    """A system that adds gradients as they are."""

    def release(self, task: kit.Task, records: Sequence[kit.Record], bound: float, noise: float = 0.0) -> kit.Release:
        return super().release(task, records, 1e30, noise)


@pytest.mark.parametrize("name", run.names())
def test_attack_fails(name: str) -> None:
    outcome = run.run(name, systems.FastDP())
    assert run.held(outcome), outcome


@pytest.mark.parametrize("name", run.names())
def test_attack_is_a_page_with_a_statement(name: str) -> None:
    script = run.load(name)
    assert script.__file__ is not None
    with open(script.__file__, encoding="utf-8") as file:
        assert len(file.readlines()) <= 40
    assert len(run.statement(script)) > 30


@pytest.mark.parametrize("name", ["tied_table", "huge_record", "four_dimensions", "expanded_tokens", "long_record"])
def test_an_attack_notices_that_nothing_is_clipped(name: str) -> None:
    assert not run.held(run.run(name, Unclipped()))


def test_what_leaves_without_noise_moves_without_bound() -> None:
    class Leaking(systems.FastDP):
        def release(self, *args: Any, **kwargs: Any) -> kit.Release:
            released = super().release(*args, **kwargs)
            return kit.Release(released.sums, {"mean": torch.tensor(float(len(args[1])))})

    assert run.run("tied_table", Leaking()) == {"verdict": "moved", "moved": "inf"}


def test_a_crash_is_no_refusal() -> None:
    class Crashing(systems.FastDP):
        def release(self, *args: Any, **kwargs: Any) -> kit.Release:
            return torch.zeros(2) @ torch.zeros(3)  # type: ignore[return-value]

    outcome = run.run("tied_table", Crashing())
    assert outcome["verdict"] == "crashed"
    assert not run.held(outcome)
    assert run.run("copied_folder", systems.Opacus()) == {"verdict": "n/a"}


def test_the_table_says_what_each_system_did() -> None:
    rows = [
        {
            "attack": "a",
            "shows": "A thing",
            "outcomes": {"fastdp": {"verdict": "refused", "said": "ValueError: no | no"}},
        },
        {"attack": "b", "shows": "B thing", "outcomes": {"fastdp": {"verdict": "moved", "moved": "inf"}}},
    ]
    text = run.table({"date": "2026-11-22", "systems": {"fastdp": "1", "Opacus": "2"}, "attacks": rows})
    assert "| `a` | A thing | refused | not run |" in text
    assert "| `b` | B thing | without bound | not run |" in text
    assert "- `a`: no \\| no" in text


def test_the_page_shows_the_committed_outcomes() -> None:
    root = Path(__file__).parents[2]
    found = json.loads((root / "bench" / "results" / "attacks.json").read_text())["figures"]
    assert run.table(found) in (root / "docs" / "attacks.md").read_text()
    assert [row["attack"] for row in found["attacks"]] == run.names()


def test_a_file_keeps_the_rows_of_attacks_that_are_not_run_again(tmp_path: Path) -> None:
    system, path = systems.FastDP(), tmp_path / "attacks.json"
    assert run.earlier(path, [system]) == []
    rows = [{"attack": name, "outcomes": {}} for name in ("huge_record", "tied_table", "no_longer_there")]
    path.write_text(json.dumps({"figures": run.figures([system], rows)}))
    again = {"attack": "tied_table", "outcomes": {"fastdp": {"verdict": "refused"}}}
    assert run.merged(run.earlier(path, [system]), [again]) == [rows[0], again]
    with pytest.raises(ValueError, match="run all attacks anew"):
        run.earlier(path, [system, systems.Opacus()])
