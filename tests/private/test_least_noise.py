"""A release with less noise than its event in the ledger has is refused, and neither made nor counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastdp
from fastdp.engine.clip.policy import Policy
from fastdp.private.observer import Observer
from fastdp.private.plan import Plan
from tests.cases import cases, pairs
from tests.engine.runs import Classifier, logical_step, start


class Cheaper(fastdp.DPSGD):
    """DP-SGD that gives its gradients a share of the noise that its budget says."""

    share = 0.0

    def policy(self, parameters: Any, noise_multiplier: float, outcome: Any = None) -> Policy:
        return super().policy(parameters, self.share * noise_multiplier, outcome)


@cases(
    *pairs(
        ("share, refused", [(0.0, True), (0.6, True), (0.999, True), (1.0, False), (1.5, False)]),
        ("fused", [False, True]),
    )
)
def test_a_method_that_gives_less_noise_than_its_budget_says(share: float, refused: bool, fused: bool) -> None:
    kind = type("Method", (Cheaper,), {"share": share})
    model = Classifier()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = fastdp.optim.AdamW(model.parameters()) if fused else torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-3, "method": kind(max_grad_norm=1.0)}
    private = start(model, None, optimizer, **options)
    if not refused:
        logical_step(private)
        assert private.ledger.spent_steps == 1
        return
    with pytest.raises(RuntimeError, match="nothing was released"):
        logical_step(private)
    assert private.ledger.spent_steps == 0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


class Keeper(Observer):
    """Holds the accumulator of a run beyond its release."""

    def before_release(self, accumulator: Any) -> None:
        self.accumulator = accumulator


def test_a_policy_that_is_replaced_between_steps_is_judged_as_well() -> None:
    private = start(Classifier(), noise_multiplier=1.0, target_delta=1e-3)
    private.observe(keeper := Keeper())
    logical_step(private)
    accumulator = keeper.accumulator
    policy = accumulator.policy
    accumulator.policy = Policy(policy.bounds, tuple(0.5 * std for std in policy.stds), policy.group_of)
    with pytest.raises(RuntimeError, match="noise multiplier is 0.5"):
        logical_step(private)
    assert private.ledger.spent_steps == 1


def test_a_schedule_of_noise_changes_at_the_step_that_it_names() -> None:
    plan = Plan(100, 10, 20, 10, "poisson", "add_remove", None, 1e-3, 1.5, factors=((0, 1.0), (5, 2.0), (9, 0.5)))
    assert [plan.sigma_at(step) for step in (0, 4, 5, 8, 9, 19)] == [1.5, 1.5, 3.0, 3.0, 0.75, 0.75]
