"""The table of ops in the documents is what the committed results say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastdp.bench import plots, record

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"device": "a processor", "threads": 2, "instruction_set": "avx2", "versions": {"torch": "2"}}
ROW = {"op": "snap", "size": "3 of 4", "seconds": 0.01234, "share_of_floor": 0.5, "speedup over torch": 2.0}
FLOOR = {"op": "floor"}


def results(path: Path, *rows: dict) -> Path:
    path.write_text(json.dumps({"environment": ENVIRONMENT, "figures": [FLOOR, *rows]}))
    return path


def test_the_documents_show_the_committed_results():
    shown = (ROOT / "docs" / "kernels.md").read_text()
    assert plots.table(ROOT / "bench" / "results" / "cpu" / "kernels.json") in shown


def test_the_picture_of_readme_shows_what_results_say(tmp_path):
    text = (ROOT / "docs" / "results.md").read_text()
    assert all(f"{value:.1f}" in text for value in plots.perplexities().values())
    plots.overview(tmp_path / "overview.png")
    assert (tmp_path / "overview.png").stat().st_size > 10_000


def test_a_line_an_op(tmp_path):
    other = {"speedup over cdist": 3.0}
    rows = [{**ROW, **other}, {**ROW, "op": "y"}, {"op": "x", "size": "", "failed": "bad"}]
    rows.append({key: value for key, value in {**ROW, **other}.items() if key != "speedup over torch"})
    text = plots.table(results(tmp_path / "kernels.json", *rows))
    assert text.splitlines()[0] == "a processor, 2 threads, avx2, torch 2."
    assert text.splitlines()[4:] == [
        "| `snap` | 3 of 4 | 0.01234 | 0.50 | torch 2.00x |",
        "| `y` | 3 of 4 | 0.01234 | 0.50 | torch 2.00x |",
        "| `x` | | bad | | |",
        "| `snap` | 3 of 4 | 0.01234 | 0.50 | cdist 3.00x |",
    ]


def test_insertion_replaces_the_table_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: begin -->\nold\n<!-- table: end -->\nafter\n")
    for text in ("new", "newer"):
        record.insert(page, text)
        assert page.read_text() == f"before\n<!-- table: begin -->\n{text}\n<!-- table: end -->\nafter\n"
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match="needs the lines"):
        record.insert(page, "new")
    assert page.read_text() == "no marks\n"
