"""The tutorial's blocks run one after the other in an empty folder; the tables of choosing.md are what the accounting says."""

import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastdp.accounting import calibrate, dpsgd, membership_bound
from fastdp.cli import app
from tests.cases import cases

DOCS = Path(__file__).parent.parent / "docs"
EXAMPLES, EPOCHS, DELTA = 40_000, 4, 1e-5


@pytest.mark.timeout(600)
def test_the_tutorial_runs_from_the_table_to_generated_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "tutorial.md").read_text(), flags=re.DOTALL)
    exec("\n".join(blocks), {})
    said = capsys.readouterr().out
    assert re.search(r"epsilon [78]\.\d\d", said), said
    # A model that the noise has broken ends at once.
    assert re.search(r"What does item 7 cost\? ?\w", said), said
    verified = CliRunner().invoke(app, ["verify", "items-card.json"])
    assert verified.exit_code == 0, verified.output


def rows(columns: int) -> list[list[float]]:
    found = re.findall(r"^\| [\d.]+ \|.*$", (DOCS / "choosing.md").read_text(), flags=re.MULTILINE)
    cells = [[float(cell.strip(" %")) for cell in row.strip("|").split("|")] for row in found]
    return [row for row in cells if len(row) == columns]


def run(batch: int, epsilon: float):
    steps = math.ceil(EXAMPLES / batch) * EPOCHS
    multiplier = calibrate(lambda noise: dpsgd(noise, batch / EXAMPLES, steps), epsilon, DELTA)
    return steps, multiplier, dpsgd(multiplier, batch / EXAMPLES, steps)


@cases("row", rows(5))
def test_what_an_epsilon_means(row):
    _, multiplier, event = run(256, row[0])
    bounds = [100 * membership_bound(event, rate) for rate in (0.001, 0.01, 0.1)]
    assert row[1:] == pytest.approx([multiplier, *bounds], rel=1e-3, abs=6e-3)


@cases("row", rows(4))
def test_what_a_batch_costs(row):
    steps, multiplier, _ = run(int(row[0]), 8.0)
    assert row[1:] == pytest.approx([steps, multiplier, 1000 * multiplier / row[0]], rel=1e-3, abs=6e-4)
