"""The README's table and picture are what the committed figures say."""

from pathlib import Path

from fastdp.bench import overview

ROOT = Path(__file__).parent.parent.parent


def test_the_table_is_the_committed_one():
    assert overview.table() in (ROOT / "README.md").read_text()


def test_what_is_drawn_is_what_results_say():
    text = (ROOT / "docs" / "results.md").read_text()
    for value in overview.perplexities().values():
        assert f"{value:.1f}" in text


def test_it_is_drawn(tmp_path):
    overview.draw(tmp_path / "overview.png")
    assert (tmp_path / "overview.png").stat().st_size > 10_000
