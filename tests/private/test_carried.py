"""What an optimizer carries from step to step: releases alone may have made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastdp
from tests.cases import cases, pairs
from tests.engine.runs import Classifier, collate, examples, logical_step, start
from tests.loops import train_epoch

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    # A state from the start.
    "adagrad": torch.optim.Adagrad,
}


def _plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(**collate(examples()))["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()


@cases(*pairs(("kind", KINDS), ("runs", [0, 2])))
def test_a_state_is_taken_from_ended_runs_and_refused_after_a_plain_step(kind: str, runs: int) -> None:
    model = Classifier()
    optimizer = KINDS[kind](model.parameters())
    for _ in range(runs):
        private = start(model, None, optimizer)
        logical_step(private)
        private.detach()
    _plain_step(model, optimizer)
    with pytest.raises(ValueError, match="build a new optimizer"):
        start(model, None, optimizer)


@cases("make", [torch.optim.Adam, torch.optim.RMSprop, fastdp.optim.AdamW])
def test_an_eps_of_zero_is_refused_before_budget_is_spent(make: Any) -> None:
    """Noise on a grid is exactly 0 in some coordinates, and 0 divided by 0 would be a weight."""
    model = Classifier()
    with pytest.raises(ValueError, match="set eps above 0"):
        start(model, None, make(model.parameters(), lr=0.1, eps=0.0))


def test_a_checkpoint_is_loaded_with_the_private_state_and_not_without() -> None:
    model = Classifier()
    first = start(model, None, KINDS["adam"](model.parameters()))
    logical_step(first)
    saved, known = first.optimizer.state_dict(), first.state_dict()
    for told in (True, False):
        later = Classifier()
        second = start(later, None, KINDS["adam"](later.parameters()))
        second.optimizer.load_state_dict(saved)
        if told:
            second.load_state_dict(known)
            logical_step(second)
        else:
            with pytest.raises(RuntimeError, match=r"call private\.load_state_dict as well"):
                logical_step(second)
            second.detach()
            with pytest.raises(ValueError, match="build a new optimizer"):
                start(later, None, second.optimizer)


def test_a_step_of_a_fused_optimizer_counts_as_a_write() -> None:
    model = Classifier()
    private = start(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
    before = model.first.weight._version
    train_epoch(private)
    assert model.first.weight._version >= before + private.steps_done > before
