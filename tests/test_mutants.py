"""The list of mutants: every change applies, every room has some, and the committed outcomes are of this list."""

import json
from pathlib import Path

from tests.mutants import CAUGHT, ROOT, mutants

#: Changes of the C++ code would need a build each; recipes of models and pages of programs are run as they are.
WITHOUT = {"quickstart", "distribution"}


def test_every_change_applies_and_names_tests_that_are_there():
    every = mutants()
    assert len({mutant.name for mutant in every}) == len(every) >= 120
    for mutant in every:
        assert mutant.applied() != (ROOT / mutant.file).read_text(encoding="utf-8")
        assert mutant.tests
        assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests.split()), mutant.name


def test_every_room_has_some():
    rooms = {path.name for path in (ROOT / "fastdp").iterdir() if (path / "__init__.py").exists()} - WITHOUT
    assert rooms <= {Path(mutant.file).parts[1] for mutant in mutants()}
    assert any(mutant.file.startswith("kernels/") for mutant in mutants())


def test_the_committed_outcomes_are_of_the_list():
    rows = json.loads((ROOT / "bench" / "results" / "mutants.json").read_text())["changes"]
    known = {mutant.name: mutant for mutant in mutants()}
    assert {row["change"] for row in rows} <= known.keys()
    assert all(row["outcome"] == CAUGHT or known[row["change"]].survives for row in rows)
    assert sum(row["outcome"] == CAUGHT for row in rows) >= 110
