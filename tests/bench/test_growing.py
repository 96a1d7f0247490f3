"""What is made of the points that `bench.growing` measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.growing import SWEEPS, WAYS, draw, exponent, summary


def points() -> list[dict[str, Any]]:
    """As if seconds grew with the square and bytes with the root of each size, and pieces cost half again."""
    return [
        {
            **{"axis": axis, "at": at, "way": way, "bytes": 1e6 * at**0.5},
            "seconds": (1.5 if way.endswith("pieces") else 1.0) * at**2 / 100,
            **({"release": at**2 / 10_000} if way.startswith("private") else {}),
        }
        for axis, settings in SWEEPS.items()
        for at in (getattr(setting, axis) for setting in settings)
        for way in (WAYS if axis == "ranks" else WAYS[:2])
    ]


@pytest.mark.parametrize("power", [-1.0, 0.0, 0.5, 2.0])
def test_an_exponent_is_that_of_a_power_law(power: float) -> None:
    assert exponent([(x, 7.0 * x**power) for x in (2, 4, 8, 64)]) == pytest.approx(power, abs=1e-12)


def test_the_summary_says_what_the_bars_ask_for() -> None:
    found = summary(points())
    assert set(found["exponents"]) == {"batch", "tokens", "width", "words", "ranks"}
    assert found["exponents"]["width"]["private"] == {"seconds": 2.0, "bytes": 0.5}
    assert set(found["exponents"]["ranks"]) == set(WAYS)
    assert found["share of noise and ledger by batch"] == pytest.approx(dict.fromkeys((2, 4, 8, 16, 32), 0.01))
    assert found["two processes over half of one"] == pytest.approx(dict.fromkeys(WAYS, 8.0))


def test_a_picture_has_a_panel_for_each_axis(tmp_path: Path) -> None:
    draw(points(), tmp_path / "growing.png")
    assert (tmp_path / "growing.png").stat().st_size > 50_000
