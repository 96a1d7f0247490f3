"""Noise and clipping that change with the steps: each step is drawn, recorded and accounted at its own multiplier."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import fastdp
import fastdp.accounting as accounting
from fastdp.accounting.events import flatten
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.policy import Policy
from fastdp.private.observer import Observer
from tests.cases import cases
from tests.engine.runs import start
from tests.loops import train

PRIVATE: dict[str, Any] = {"target_delta": 1e-3, "epochs": 2, "max_physical_batch_size": 3}
HALVING = {0: 2.0, 2: 1.0, 4: 0.5}


class Policies(Observer):
    """Keeps the policy of each release."""

    def __init__(self) -> None:
        self.seen: list[Policy] = []

    def before_release(self, accumulator: Accumulator) -> None:
        self.seen.append(accumulator.policy)


def run(private: Any, steps: int) -> list[Policy]:
    """The policies of the next releases."""
    looker = Policies()
    private.observe(looker)
    train(private, private.steps_done + steps)
    private.unobserve(looker)
    return looker.seen


def counted(event: Any) -> Counter[float]:
    return Counter({z: count for _, z, count in flatten(event).sampled})


def test_each_step_has_the_noise_that_its_event_says() -> None:
    private = start(method=fastdp.DPSGD(noise_schedule=HALVING), noise_multiplier=1.5, **PRIVATE)
    for done in range(6):
        (policy,) = run(private, 1)
        assert policy.bounds == (1.0,)
        assert policy.stds == ((3.0, 3.0, 1.5, 1.5, 0.75, 0.75)[done],)
        expected = Counter([3.0, 3.0, 1.5, 1.5, 0.75, 0.75][: done + 1])
        assert counted(private.ledger.event()) == expected


def test_the_budget_is_met_exactly_and_the_card_verifies(tmp_path: Path) -> None:
    method = fastdp.DPSGD(noise_schedule=HALVING, clipping_schedule={3: 0.5})
    private = start(
        method=method,
        target_epsilon=4.0,
        output_dir=tmp_path,
        unsafe_seed=None,
        **{**PRIVATE, "noise_multiplier": None},
    )
    policies = run(private, 6)
    assert 0.99 * 4.0 < private.epsilon() <= 4.0
    assert [policy.bounds[0] for policy in policies] == [1.0] * 3 + [0.5] * 3
    sigma = private.noise_multiplier
    assert [p.noise_multiplier / sigma for p in policies] == pytest.approx([2.0, 2.0, 1.0, 1.0, 0.5, 0.5])
    card = private.card()
    assert card["mechanism"]["noise_schedule"] == [[0, 2.0], [2, 1.0], [4, 0.5]]
    card.save(tmp_path / "card.json")
    private.detach()
    assert accounting.verify(tmp_path / "card.json", ledger=tmp_path / "ledger.jsonl").guarantee
    # One that says its noise was constant states steps that its event does not hold.
    told = {**card, "mechanism": {**card["mechanism"], "noise_schedule": [[0, 0.4]]}}
    refused = accounting.verify(_resigned(told))
    assert not refused
    assert "its event holds 0" in refused.reason


def _resigned(card: dict[str, Any]) -> dict[str, Any]:
    from fastdp.accounting.card import digest

    return {**card, "digest": digest({key: value for key, value in card.items() if key != "digest"})}


def test_a_resumed_run_goes_on_where_its_ledger_stands(tmp_path: Path) -> None:
    settings = {
        "method": fastdp.DPSGD(noise_schedule=HALVING),
        "noise_multiplier": 1.0,
        "output_dir": tmp_path,
        **PRIVATE,
    }
    first = start(**settings)
    run(first, 3)
    state = first.state_dict()
    run(first, 1)
    first.detach()
    again = start(resume=True, **settings)
    again.load_state_dict(state)
    assert again.steps_done == 4, "a step that was released after the checkpoint stays spent"
    assert [policy.noise_multiplier for policy in run(again, 2)] == [0.5, 0.5]
    assert counted(again.ledger.event()) == {2.0: 2, 1.0: 2, 0.5: 2}
    again.detach()
    with pytest.raises(ValueError, match="another mechanism"):
        start(**{**settings, "method": fastdp.DPSGD(), "resume": True})


def test_shuffled_epochs_count_at_their_least_noise() -> None:
    private = start(
        method=fastdp.DPSGD(noise_schedule={0: 2.0, 2: 1.0, 5: 3.0}),
        noise_multiplier=1.0,
        sampling="shuffled",
        **PRIVATE,
    )
    assert [policy.noise_multiplier for policy in run(private, 6)] == [2.0, 2.0, 1.0, 1.0, 1.0, 3.0]
    # Three steps an epoch: the least of each is 1.
    assert flatten(private.ledger.event()).mu_squared == pytest.approx(2.0)


@given(st.dictionaries(st.integers(1, 12), st.floats(0.25, 4.0), max_size=4), st.integers(1, 4), st.integers(0, 14))
def test_an_epoch_that_is_shuffled_is_never_counted_below_any_of_its_steps(
    factors: dict[int, float], per_epoch: int, steps: int
) -> None:
    given = tuple(({0: 1.0} | dict(sorted(factors.items()))).items())

    def at(step: int) -> float:
        return next(factor for start, factor in reversed(given) if start <= step)

    model = accounting.dpsgd_model(1.0, 0.5, "shuffled", per_epoch, given)
    epochs = -(-steps // per_epoch)
    least = [min(at(e * per_epoch + i) for i in range(per_epoch)) for e in range(epochs)]
    assert flatten(model.event(steps)).mu_squared == pytest.approx(sum(z**-2 for z in least))
    sampled = accounting.dpsgd_model(1.0, 0.5, "poisson", None, given)
    found = Counter({round(z, 9): count for z, count in counted(sampled.event(steps)).items()})
    assert found == Counter(round(at(step), 9) for step in range(steps))


@cases(
    "settings, match",
    [
        ({"noise_schedule": {-1: 1.0}}, "noise_schedule has the step -1"),
        ({"noise_schedule": {1.5: 1.0}}, "noise_schedule has the step 1.5"),
        ({"noise_schedule": {0: 0.0}}, "noise_schedule has the factor 0.0 at step 0"),
        ({"clipping_schedule": {0: math.inf}}, "clipping_schedule has the factor inf"),
        ({"noise_schedule": {i: 1.0 + i for i in range(65)}}, "has 65 entries: give at most 64"),
        ({"clipping_schedule": {3: 0.5}, "adaptive": fastdp.AdaptiveClipping()}, "both clipping_schedule and adaptive"),
    ],
)
def test_a_schedule_out_of_range_is_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fastdp.DPSGD(**settings)


def test_an_adaptive_threshold_keeps_what_it_learnt_when_the_noise_changes() -> None:
    adaptive = fastdp.AdaptiveClipping(count_noise_std=5.0)
    method = fastdp.DPSGD(noise_schedule={2: 0.5}, adaptive=adaptive)
    policies = run(start(method=method, noise_multiplier=1.0, **PRIVATE), 4)
    bounds = [policy.bounds[0] for policy in policies]
    assert len(set(bounds)) == 4
    wanted = [adaptive.gradient_multiplier(z) for z in (1.0, 1.0, 0.5, 0.5)]
    assert [policy.noise_multiplier for policy in policies] == pytest.approx(wanted)
