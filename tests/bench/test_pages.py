"""docs/results.md says what the committed figures say."""

import re
from pathlib import Path

import pytest

from fastdp.bench import pages

PAGE = Path(__file__).parent.parent.parent / pages.PAGE


def test_the_page_holds_what_is_computed():
    assert PAGE.read_text() == pages.written(PAGE.read_text()), "run python -m bench.pages"


def test_every_figure_of_a_sentence_stands_in_a_table():
    """Decimal figures alone: whole numbers are settings and counts."""
    text = PAGE.read_text()
    tables = "\n".join(pages.table(name) for name in pages.TABLES)
    sentences = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->|`[^`]*`", "", text, flags=re.DOTALL)
    said, computed = (set(re.findall(r"(?<![\w.])\d*\.\d+", part)) for part in (sentences, tables))
    assert len(said) > 20
    assert said <= computed


def test_a_table_without_a_place_is_refused():
    with pytest.raises(ValueError, match="runs: begin"):
        pages.written("# Results\n")


def test_a_row_that_spends_more_than_its_column_says_is_refused():
    row = {"form": "DP-SGD", "epsilon": 3.0, "true_epsilon": 3.1}
    with pytest.raises(ValueError, match=r"spends 3\.1"):
        pages.at_true_epsilon([row])
