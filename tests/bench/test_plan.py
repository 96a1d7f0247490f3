"""What a plan foretold is compared with what the run took, and rows that are off are named."""

import csv
import json
import sys

import pytest
from fastdp.bench import plan

from fastdp.quickstart import MODEL


def judged(rows, tmp_path, monkeypatch):
    """The exit code of a comparison whose rows were all measured before."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"figures": rows}))
    monkeypatch.setattr(sys, "argv", ["plan", "--data", str(tmp_path), "--model", "none", "--json", str(path)])
    with pytest.raises(SystemExit) as ended:
        plan.main()
    return ended.value.code


@pytest.mark.parametrize(
    ("off", "code", "missed"), [(0.1, 0, ""), (0.12, 1, "MISSED: bytes"), (0.2, 1, "seconds, bytes")]
)
def test_a_bar_that_is_missed_is_named(off, code, missed, tmp_path, monkeypatch, capsys):
    figures = {"seconds": 1.0, "bytes": 1e9}
    rows = [
        {"data": name, "peft": peft, "foretold": figures, "taken": figures, "off": dict.fromkeys(figures, off)}
        for name, peft in plan.CASES
    ]
    assert judged(rows, tmp_path, monkeypatch) == code
    said = capsys.readouterr().out
    assert missed in said
    assert said.count("MISSED") == 4 * code


@pytest.mark.slow
def test_plan_and_run_are_measured_apart(tmp_path):
    (tmp_path / "e2e").mkdir()
    with open(tmp_path / "e2e" / "train.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mr", "ref"])
        writer.writerows([f"name[place {n}], food[French]", f"Place {n} serves French food."] for n in range(600))
    row = plan.compare("e2e", "lora", MODEL, tmp_path)
    for found in (row["foretold"], row["taken"]):
        assert 0 < found["seconds"] < 120
        assert found["bytes"] > 1e8
    assert row["foretold"]["lengths"][0] > 10
    assert row["foretold"]["steps"] == row["taken"]["steps"]
