"""Opacus's layers, drawn by their kinds and arguments: exact, or refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastdp.bench import fuzz

from tests.cases import cases
from tests.engine import opacus_layers

pytest.importorskip("opacus")
ROOT = Path(__file__).parents[2]
#: By kind, how many random cases were exact by which route.
COMMITTED = json.loads((ROOT / "bench" / "results" / "opacus-layers.json").read_text())["figures"]


@cases("kind", opacus_layers.KINDS)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_a_layer_of_each_kind(kind: str) -> None:
    found = fuzz.run(opacus_layers.case(kind, 0))
    assert found.verdict == "exact", found.why
    assert str(found) in COMMITTED[kind]["cases"], found.why


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_every_kind_twenty_times() -> None:
    for kind in opacus_layers.KINDS:
        for found in (fuzz.run(opacus_layers.case(kind, seed)) for seed in range(20)):
            assert found.verdict in ("exact", "refused"), (kind, found.why)


def test_flat_ids_beside_offsets_are_refused_by_name() -> None:
    found = opacus_layers.flat_bags()
    assert found.verdict == "refused"
    assert "layer.inner.weight: flat ids beside offsets" in found.why
