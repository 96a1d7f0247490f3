"""Curves that may be shown: their noise is paid from the run's ledger, within the run's own budget."""

import dataclasses
import json

import pytest
import torch

from fastdp.accounting import Card, EventModel, Ledger, calibrate, dpsgd, gaussian, verify
from fastdp.finetune import curves, finetune, judges
from fastdp.finetune.config import ConfigError
from fastdp.finetune.curves import Curves
from fastdp.finetune.judges import LARGEST_LOSS
from fastdp.finetune.report import build_report
from tests.cases import cases


def test_points_are_marked_as_released_and_paid_for(config, tmp_path):
    result = finetune(dataclasses.replace(config, private_metrics=1.0))
    output = tmp_path / "run"
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert all(set(row["released"]) == {"held_out_loss"} for row in rows)
    assert all("held_out_loss" not in row["unprotected"] for row in rows)
    ledger = Ledger.read(output / "ledger.jsonl")
    assert ledger.spent("metrics") == ledger.budget("metrics") == len(rows) == 3
    assert 7.9 < result.epsilon <= 8
    card = Card.load(output / "card.json")
    assert verify(card, weights=output, ledger=output / "ledger.jsonl").recomputed <= 8
    assert "by step" in build_report([output], public=True).split("Held out, released with noise")[1]
    # The training alone would have had less noise.
    assert result.noise_multiplier > calibrate(lambda z: dpsgd(z, 16 / 48, 3), 8.0, 1e-3)


def test_a_point_costs_what_the_ledger_says_and_none_is_made_twice(config, monkeypatch):
    asked = []
    made = Curves(dataclasses.replace(config, private_metrics=1.0), 48)
    ledger = Ledger.create(None, {}, event=EventModel(gaussian(1.0)), budget_steps=1)
    made.declare(ledger)
    monkeypatch.setattr(curves, "scores", lambda *_: torch.tensor([[0.5, 1.0], [1.0, 0.0]]))
    monkeypatch.setattr(judges, "add_noise_", lambda total, std, stream: asked.append(std))
    assert made.point(ledger, None, [0, 1], None) == {"held_out_loss": 0.75 * LARGEST_LOSS, "held_out_accuracy": 0.5}
    assert asked == [made.multiplier * 2**0.5]
    for _ in range(made.count - 1):
        assert made.point(ledger, None, [0, 1], None)
    assert made.point(ledger, None, [0, 1], None) is None


@cases(
    ("settings", "message"),
    [
        ({"private_metrics": 8.0}, "between 0 and epsilon"),
        ({"private_metrics": 1.0, "eval": None}, "name some with eval"),
        ({"private_metrics": 1.0, "method": "frost"}, "goes with method: dpsgd"),
        ({"private_metrics": 1.0, "epsilon": float("inf")}, "between 0 and epsilon"),
    ],
)
def test_refusals(config, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        finetune(dataclasses.replace(config, **settings))
    assert not (tmp_path / "run").exists()
