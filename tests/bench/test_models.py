"""The table of models is what the committed figures say, of every model that is tried."""

import json
from pathlib import Path

from fastdp.bench import fuzz, models

ROOT = Path(__file__).parent.parent.parent
FIGURES = json.loads((ROOT / "bench" / "results" / "models.json").read_text())["figures"]


def test_the_page_shows_the_committed_figures():
    assert models.page(FIGURES) == (ROOT / "docs" / "models.md").read_text()


def test_every_model_that_is_tried_has_its_row_and_is_exact():
    assert list(FIGURES) == list(models.cases())
    assert max(found["error"] for own in FIGURES.values() for found in own.values() if found) < fuzz.TOLERANCE


def test_a_row_is_what_a_step_gives():
    found = models.measured(models.cases()["bert"], "bitfit")
    assert found["error"] < fuzz.TOLERANCE
    assert all(found[key] == FIGURES["bert"]["bitfit"][key] for key in ("route", "fast", "reason"))
