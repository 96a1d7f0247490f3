"""Releases between training steps: what a method prepares is paid for, kept, resumed and undone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdp import accounting
from fastdp.accounting import BudgetExceeded, epsilon
from fastdp.private.method import Method
from fastdp.private.plan import Budget, Plan, SideRelease
from fastdp.private.preparation import Findings, Outcome, Preparation
from tests.engine.runs import Classifier, loader, start
from tests.loops import train
from tests.private.test_preparation import Sneaky

RATE, NOISE = 0.5, 2.0


def ones(batch: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Each unit's share in a count."""
    yield {"count": torch.ones(len(batch["labels"]), 1)}


@dataclass(frozen=True)
class Choosy(Sneaky):
    """Trains ``first`` or ``second``, by a noisy count of a sample; ``every`` steps anew."""

    acts: Any = None
    every: int = 100
    budgeted: int = 1
    fails: bool = False
    mechanism: str = field(default="choosy", init=False)

    def budget(self, plan: Plan) -> Budget:
        side = (SideRelease("count", NOISE, RATE, self.budgeted),)
        return Budget(plan.multiplier(side), side)

    def prepares_at(self, step: int) -> bool:
        return step % self.every == 0

    def prepare(self, preparation: Preparation) -> None:
        sample = preparation.release("count")
        if self.fails:
            raise RuntimeError("a fault of the method")
        sample.total(ones, 1.0, {"count": torch.zeros(1)})

    def conclude(self, findings: Findings) -> Outcome:
        return {"count": findings.releases[0]["count"], "choice": torch.tensor(len(findings.outcome) and 1)}

    def trained(self, parameters: Mapping[str, torch.nn.Parameter], outcome: Outcome) -> Sequence[str]:
        prefix = ("first", "second")[int(outcome["choice"])]
        return [name for name in parameters if name.startswith(prefix)]


def make(method: Method, **options: Any) -> Any:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return start(
        model, loader(), optimizer, method=method, **{"noise_multiplier": 1.0, "target_delta": 1e-3, **options}
    )


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moved(before: Mapping[str, torch.Tensor], model: torch.nn.Module) -> set[str]:
    return {name.partition(".")[0] for name, p in model.named_parameters() if not torch.equal(before[name], p)}


def test_a_preparation_is_paid_for_beside_the_steps() -> None:
    private = make(Choosy(), noise_multiplier=None, target_epsilon=4.0, unsafe_seed=None)
    train(private, private.total_steps)
    steps = accounting.dpsgd(private.noise_multiplier, private.sample_rate, private.total_steps)
    both = accounting.compose(steps, accounting.poisson_gaussian(NOISE, RATE))
    assert private.epsilon() == pytest.approx(float(epsilon(both, 1e-3)))
    assert private.epsilon() <= 4.0
    assert float(epsilon(steps, 1e-3)) < 0.99 * private.epsilon(), "the preparation was free"
    assert accounting.verify(private.card())


def test_what_is_not_trained_is_frozen_and_leaves_the_optimizer() -> None:
    private = make(Choosy())
    before = values(private.model)
    train(private, 2)
    assert moved(before, private.model) == {"first"}
    held = [p for group in private.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in private.model.first.parameters()}
    assert not any(p.requires_grad for p in private.model.second.parameters())
    private.detach()
    assert all(p.requires_grad for p in private.model.parameters())
    assert len(private.optimizer.param_groups[0]["params"]) == 4


def test_a_second_preparation_replaces_the_first() -> None:
    private = make(Choosy(every=3, budgeted=2))
    train(private, 3)
    before = values(private.model)
    train(private, 5)
    assert moved(before, private.model) == {"second"}
    assert private.ledger.spent("count") == 2


def test_extending_pays_for_the_preparations_to_come() -> None:
    private = make(Choosy(every=2, budgeted=2), epochs=1, unsafe_seed=None)
    assert private.total_steps == 3
    train(private, 3)
    before = private.epsilon()
    private.extend(1.0)
    train(private, 6)
    assert private.ledger.spent("count") == private.ledger.budget("count") == 3
    both = accounting.compose(
        accounting.dpsgd(1.0, private.sample_rate, 6), *[accounting.poisson_gaussian(NOISE, RATE)] * 3
    )
    assert private.epsilon() == pytest.approx(float(epsilon(both, 1e-3)))
    assert private.epsilon() > before


def test_a_method_that_fails_has_spent_and_leaves_a_model_that_works() -> None:
    private = make(Choosy(fails=True))
    with pytest.raises(RuntimeError, match="a fault of the method"):
        train(private, 1)
    assert private.ledger.spent("count") == 1
    private.detach()
    batch = next(iter(loader()))
    private.model(**batch)["loss"].backward()
    assert all(p.grad is not None for p in private.model.parameters())


def test_without_the_kept_outcome_a_resumed_run_is_refused(tmp_path: Path) -> None:
    """As after a kill between the record and the file: the budget may have been used, so it counts as used."""
    first = make(Choosy(), output_dir=tmp_path)
    train(first, 1)
    first.detach()
    for path in tmp_path.glob("preparation-*"):
        path.unlink()
    second = make(Choosy(), output_dir=tmp_path, resume=True)
    with pytest.raises(BudgetExceeded):
        train(second, 3)


def test_a_checkpoint_carries_the_outcome_and_what_it_cost() -> None:
    first = make(Choosy())
    train(first, 2)
    state = first.state_dict()
    second = make(Choosy())
    second.load_state_dict(state)
    assert float(second.outcome["count"]) == float(first.outcome["count"])
    assert second.epsilon() == first.epsilon()
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    train(second, 4)
    assert second.ledger.spent("count") == 1


def test_a_new_run_does_not_take_another_runs_outcome(tmp_path: Path) -> None:
    first = make(Choosy(), output_dir=tmp_path)
    train(first, 1)
    first.detach()
    (tmp_path / "ledger.jsonl").unlink()
    second = make(Choosy(), output_dir=tmp_path)
    train(second, 1)
    assert second.ledger.spent("count") == 1


def test_a_step_does_not_ask_again_about_all_steps_before() -> None:
    asked: list[int] = []

    class Counted(Choosy):
        def prepares_at(self, step: int) -> bool:
            asked.append(step)
            return super().prepares_at(step)

    private = make(Counted())
    train(private, 4)
    asked.clear()
    train(private, 6)
    assert max(map(asked.count, asked)) == 1
    outcome = private.outcome
    private.prepare()
    assert private.outcome is outcome
