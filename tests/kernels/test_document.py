"""docs/kernels.md says what the compiled kernels are, and all processors have work at the shapes of its goals."""

import json

import pytest

pytest.importorskip("triton")

import triton
from fastdp.bench.meter import GPUS
from fastdp.bench.pages import RESULTS
from fastdp.bench.record import with_table

from tests.cases import cases

from . import document


def test_the_page_says_what_was_compiled():
    page = document.PAGE.read_text()
    if f"Triton {triton.__version__}, sm_90." not in page:
        # The constraints pin the page's Triton, so the default suite does compare; a user's own may differ.
        pytest.skip("the page is of another Triton, which compiles to other instructions")
    assert page == with_table(page, document.kernels_table(), document.KERNELS), "run python -m tests.kernels.document"


def test_each_simulated_file_holds_both_steps_of_its_case():
    """Each marked as simulated."""
    for file in (RESULTS / "simulated").glob("*.json"):
        figures = json.loads(file.read_text())["figures"]
        assert figures["simulated"] is True
        assert [row["step"] for row in figures["rows"] if row["simulated"]] == ["plain", "private"]
        # Sums are float32 between microbatches, where a plain step adds up gradients of 16 bits.
        most = 1.15 if figures["rows"][-1].get("microbatches", 1) > 1 else 1.05
        assert max(row["ratio_memory"] for row in figures["rows"]) <= most


@cases("shape", document.SHAPES)
def test_processors_are_busy(shape):
    layers, groups, length, units = document.SHAPES[shape]
    assert document.gram_busy(groups * layers, length, units) >= 0.85
    assert all(document.sum_busy(m, n, length * units) >= 0.85 for n, lefts in groups for m in lefts)


@cases(
    "name, share",
    [
        ("gram-bf16-described", "gram_share"),
        ("weighted-bf16-described", "sums_share"),
        ("direct-bf16-wide", "wide_share"),
        ("direct-bf16", "own_share"),
    ],
)
def test_simulated_steps_are_priced_by_the_compiled_loops(name, share):
    allowed, priced = document.allowed_rate(name), getattr(GPUS["h100"], share) * GPUS["h100"].half
    # Prices are what kernels took within steps, which is no less than their loops take.
    assert 0.85 * allowed <= priced <= allowed
