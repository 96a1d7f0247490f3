"""The table of methods, samplers and accountants says what was tried on this tree."""

from pathlib import Path

import pytest
from fastdp.bench.combinations import COLUMNS, DELTA, METHODS, PAGE, bounded_by, page, released

ROOT = Path(__file__).parent.parent.parent


def test_a_row_of_the_page_is_what_a_run_gives():
    name = "DP-SGD"
    row = next(line for line in (ROOT / PAGE).read_text().splitlines() if line.startswith(f"| {name} |"))
    *others, last = row.removesuffix(" |").split(" | ")[1:]
    assert others == [bounded_by(released(METHODS[name](), *column), column[1]) for column in COLUMNS[:-1]]
    assert last == "refused"
    with pytest.raises(ValueError, match="hold nothing for adjacency='add_remove'"):
        released(METHODS[name](), *COLUMNS[-1])


def test_a_release_without_noise_has_no_bound():
    from fastdp.accounting import dpsgd

    assert bounded_by(dpsgd(0.0, 0.2, 3), "add_remove") == ""
    assert 0 < DELTA < 1


@pytest.mark.slow
def test_the_page_is_what_is_tried():
    assert page() == (ROOT / PAGE).read_text()
