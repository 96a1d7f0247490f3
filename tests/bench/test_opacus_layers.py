"""Opacus's layers, drawn by their kinds and arguments: exact, or refused in words."""

from __future__ import annotations

import pytest
from fastdp.bench import fuzz, opacus_layers

pytest.importorskip("opacus")


@pytest.mark.parametrize("kind", opacus_layers.KINDS)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_a_layer_of_each_kind(kind: str) -> None:
    found = fuzz.run(opacus_layers.case(kind, 0))
    assert found.verdict == "exact", found.why


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_every_kind_twenty_times() -> None:
    for kind, found in opacus_layers.table(20).items():
        assert found["cases"].keys() <= {"exact, uses", "exact, one-example", "refused"}, (kind, found["reasons"])


def test_flat_ids_beside_offsets_are_refused_by_name() -> None:
    found = opacus_layers.flat_bags()
    assert found.verdict == "refused"
    assert "layer.inner.weight: flat ids beside offsets" in found.why
