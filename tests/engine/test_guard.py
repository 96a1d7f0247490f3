"""What the guard looks at anew each time, and what it takes once."""

from typing import Any

import pytest
import torch
from torch import nn

from fastdp.engine.guard import Guard


def settled() -> tuple[nn.Sequential, Guard, dict[str, nn.Parameter]]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    guard = Guard(model)
    guard.settle()
    return model, guard, dict(model.named_parameters())


def test_a_module_that_joins_later_is_found_wherever_it_stands() -> None:
    model, guard, trained = settled()
    guard.require_frozen(trained)
    model[0].add_module("late", nn.Sequential(nn.Identity(), nn.Linear(3, 3)))
    with pytest.raises(RuntimeError, match="0.late.1.weight was unfrozen or added"):
        guard.require_frozen(trained)


def test_modules_that_hold_each_other_are_walked_once() -> None:
    model, guard, trained = settled()
    model[0]._modules["back"] = model
    model[1]._modules["none"] = None
    guard.require_frozen(trained)


def test_what_no_step_trains_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, guard, _ = settled()
    monkeypatch.setattr(model, "state_dict", lambda: pytest.fail("the whole state was read again"))
    guard.settle()


def test_state_that_appears_after_the_start_is_refused() -> None:
    model, guard, _ = settled()

    def add(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["secret"] = torch.ones(2)

    model.register_state_dict_post_hook(add)
    guard.settle()
    with pytest.raises(RuntimeError, match="secret was changed outside of a release"):
        guard.require_untouched(last=True)


def test_a_parameter_in_another_s_place_is_refused() -> None:
    model, guard, _ = settled()
    guard.require_settled()
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    with pytest.raises(RuntimeError, match="1.weight was changed outside of a release"):
        guard.require_settled()
