"""Searches end on the safe side of what they were given, also where a figure that they foretold is wrong."""

import math

import numpy as np
import pytest

from fastdp import accounting
from fastdp.accounting import EventModel, Ledger, calibration, pld, renyi, schedules
from tests.cases import cases

DELTA = 1e-5


@pytest.mark.parametrize("error", [-0.6, -0.3, 0.3, 0.6, 1.2])
def test_calibration_never_takes_a_certified_figure_above_the_target(monkeypatch, error):
    """The fine grid differs from what the coarse ones foretell by shares of the tolerance."""
    tolerance, target, seen = 0.02, 3.0, []

    def certified(event, *_):
        seen.append(accounting.epsilon(event, DELTA) * (1 + error * tolerance))
        return seen[-1]

    monkeypatch.setattr(calibration, "epsilon_of", certified)
    found = calibration.calibrate(lambda z: accounting.dpsgd(z, 0.05, 40), target, DELTA, tolerance=tolerance)
    cost = certified(accounting.dpsgd(found, 0.05, 40))
    assert target * (1 - 1.01 * tolerance) <= cost <= target
    if error > 0.4:
        assert seen[0] > target, "the first figure was above the target"


def test_a_schedule_is_judged_by_the_fine_grid_last_of_all(monkeypatch):
    """The ratio of the fine and the coarse figure is foretold 2% too low, so that the last search goes too far."""
    calls = []

    def fine(event, delta):
        calls.append(event)
        return accounting.epsilon(event, delta) * (0.98 if len(calls) == 1 else 1.0)

    monkeypatch.setattr(schedules, "epsilon_of", fine)
    found = schedules.epoch_weighted_schedule(400, 40, 3, 4.0, DELTA, step_distance=1.0)
    cost = accounting.epsilon(accounting.compose(*(accounting.dpsgd(z, 0.1, 10) for z in found)), DELTA)
    assert len(calls) == 2
    assert 0.9 * 4.0 < cost <= 4.0


@cases("factors", [((0, 1.0), (5, 2.0)), ((0, 2.0), (5, 1.0)), ((0, 3.0), (9, 1.0), (10, 2.0))])
def test_a_shuffled_epoch_counts_at_its_least_noise(factors):
    model = accounting.dpsgd_model(1.0, 0.1, "shuffled", 10, factors)
    assert model.event(10) == accounting.gaussian(1.0)
    assert model.event(3) == accounting.gaussian(1.0)


def test_replacing_a_unit_costs_a_choice_what_half_the_noise_does():
    for shape in (0.0, 1.0):
        replaced = accounting.chosen([accounting.gaussian(4.0)], shape, 0.1)
        halved = accounting.chosen([accounting.gaussian(2.0)], shape, 0.1)
        got = accounting.epsilon(replaced, DELTA, adjacency="replace_one")
        assert got == pytest.approx(accounting.epsilon(halved, DELTA), rel=1e-12)


@pytest.mark.parametrize("shape", [-0.5, 0.0, 1.0])
@pytest.mark.parametrize("trials", [1.5, 20])
def test_the_cost_of_a_choice_is_the_theorems(shape, trials):
    """Papernot and Steinke 2022, Theorem 2, written out on a grid of orders as fine as any."""
    z, stop = 3.0, renyi.stop_for(trials, shape)
    orders = np.concatenate([np.linspace(1.001, 8, 4000), np.linspace(8, 600, 4000)])
    trial = orders / (2 * z**2)
    over = (1 + shape) * math.log(1 / stop)
    added = min(over, ((1 + shape) * (1 - 1 / orders) * trial + over / orders).min())
    spent = trial + added + math.log(renyi.mean_trials(shape, stop)) / (orders - 1)
    least = (spent + np.log1p(-1 / orders) - np.log(DELTA * orders) / (orders - 1)).min()
    found = accounting.epsilon(accounting.chosen([accounting.gaussian(z)], shape, stop), DELTA)
    assert least <= found <= 1.02 * least


def test_a_torn_ledger_counts_a_whole_block_more(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(path, {}, event=EventModel(accounting.gaussian(1.0)), budget_steps=100, block=10)
    for _ in range(10):
        ledger.record()
    killed = tmp_path / "killed.jsonl"
    killed.write_bytes(path.read_bytes() + b'{"body": {"of": "step", "rec')
    ledger.close()
    assert Ledger.read(killed).spent_steps == 20


def many(kinds, least=1.0, share=1.0):
    """One sampled release of each of so many noise multipliers, up to twice the least."""
    return accounting.compose(*(accounting.dpsgd(least + share * i / kinds, 0.01, 1) for i in range(kinds)))


@cases(
    "event, delta",
    [
        (many(24), 1e-10),
        (accounting.compose(many(12), accounting.dpsgd(2.0, 0.02, 50), many(12, 3.0)), 1e-5),
        (accounting.chosen([many(24, 4.0), many(20, 5.0)], 0.0, 0.1), 1e-5),
    ],
)
def test_more_kinds_of_release_than_are_told_apart_cost_little_more(monkeypatch, event, delta):
    """And never less: those of neighbouring noise count as the dearest of them."""
    found = []
    for most in (10_000, 16):
        for module, cached in ((pld, pld.distributions), (renyi, renyi.divergences)):
            monkeypatch.setattr(module, "MOST_KINDS", most)
            cached.cache_clear()
        found.append(float(accounting.epsilon(event, delta)))
    assert found[0] < found[1] <= 1.2 * found[0]
