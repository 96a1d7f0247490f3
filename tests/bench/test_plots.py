"""The table of ops in the documents is what the committed results say."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastdp.bench import plots, record

ROOT = Path(__file__).parents[2]


def test_the_documents_show_the_committed_results():
    shown = (ROOT / "docs" / "kernels.md").read_text()
    assert plots.table(ROOT / "bench" / "results" / "cpu" / "kernels.json") in shown


def test_the_picture_of_readme_shows_what_results_say(tmp_path):
    text = (ROOT / "docs" / "results.md").read_text()
    assert all(f"{value:.1f}" in text for value in plots.perplexities().values())
    plots.overview(tmp_path / "overview.png")
    assert (tmp_path / "overview.png").stat().st_size > 10_000


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
