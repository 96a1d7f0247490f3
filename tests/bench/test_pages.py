"""Tables of pages hold what the committed figures say."""

import re
from pathlib import Path

import pytest
from fastdp.bench import pages, sentences

from fastdp.private.shapes import shape_statement

ROOT = Path(__file__).parent.parent.parent
RESULTS = pages.RESULTS_PAGE


@pytest.mark.parametrize("page", pages.TABLES, ids=str)
def test_a_page_holds_what_is_computed(page):
    text = (ROOT / page).read_text()
    assert text == pages.written(page, text), "run python -m bench.pages"


def test_every_figure_of_a_sentence_stands_in_a_table():
    """Or in a computed sentence. Decimal figures alone: whole numbers are settings and counts."""
    text = (ROOT / RESULTS).read_text()
    known = [*pages.tables(RESULTS).values(), *sentences.sentences(RESULTS)]
    computed = set(re.findall(r"\d*\.\d+", "".join(known)))
    prose = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->|`[^`]*`", "", text, flags=re.DOTALL)
    said = set(re.findall(r"(?<![\w.])\d*\.\d+", prose))
    assert len(said) > 20
    assert said <= computed


@pytest.mark.parametrize("page", sentences.SENTENCES, ids=str)
def test_a_page_says_what_is_computed(page):
    text = " ".join((ROOT / page).read_text().split())
    assert [sentence for sentence in sentences.sentences(page) if sentence not in text] == []


def test_a_sentence_that_the_figures_do_not_say_is_refused():
    with pytest.raises(ValueError, match="all ages"):
        sentences.holds(False, "all ages among them")


def test_a_card_states_the_last_row_of_the_table_on_shapes():
    *_, last = pages.shapes()[1]
    assert not any(row["public shapes"] for row in pages.figures("cpu/shapes"))
    assert f"by {last[1]} of the bound in float32 and by {last[2]} in bfloat16, at 12 layers" in shape_statement(False)


def test_differences_are_of_rows_that_share_a_seed():
    ours, base = (
        [{"seed": seed, "x": x} for seed, x in rows] for rows in ([(0, 11), (2, 9), (3, 5)], [(2, 10), (0, 10)])
    )
    found = pages.differences(ours, base, "x")
    assert found == pytest.approx([10, -10])
    assert pages.in_per_cent(found) == "+0.0±10.0%"
    assert pages.in_per_cent(found[:1]) == "+10.0%"


def test_a_row_that_spends_more_than_its_column_says_is_refused():
    row = {"form": "DP-SGD", "epsilon": 3.0, "true_epsilon": 3.1}
    with pytest.raises(ValueError, match=r"spends 3\.1"):
        pages.at_true_epsilon([row])
