"""Random networks against one example at a time: sixty here, two thousand in the slow tier."""

from __future__ import annotations

import pytest
from fastdp.bench import fuzz

from fastdp.engine.uses.layout import Layout


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 2000), marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_no_random_network_is_wrong_and_none_crashes(seeds: range) -> None:
    found = fuzz.table(seeds)
    assert [n for n in found["not_exact"] if n["verdict"] != "refused"] == []
    assert found["total"]["exact, uses"] > len(seeds) // 4
    assert found["total"]["exact, one-example"] > 0


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are a thousandth too large pass the engine's own check, whose room is that of float32, and not this one."""
    summed = Layout.by_lane
    monkeypatch.setattr(Layout, "by_lane", lambda self, values: 1.0005 * summed(self, values))
    seeds = [seed for seed in range(60) if {"conv2d", "conv3d"} & set(fuzz.network(seed).model.kinds)]
    assert any(fuzz.run(fuzz.network(seed)).verdict == "wrong" for seed in seeds[:6])
