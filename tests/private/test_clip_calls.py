"""Clipping that a loop still has, where a private run clips each example."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from tests.cases import cases
from tests.engine.runs import Classifier, start

PRIVATE: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-3}


def clip(model: torch.nn.Module) -> float:
    """By the name that was imported before any run was private."""
    return float(clip_grad_norm_(model.parameters(), 1.0))


def test_a_loop_that_clips_is_told_once_that_this_has_no_effect() -> None:
    private = start(**PRIVATE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in private.data_loader:
            private.model(**batch)["loss"].backward()
            assert clip(private.model) == 0
            torch.nn.utils.clip_grad_value_(private.model.first.weight, 1.0)
            private.optimizer.step()
            private.optimizer.zero_grad()
    (said,) = [entry for entry in caught if "clip" in str(entry.message)]
    assert str(said.message).startswith("clip_grad_norm_ has no effect: gradients are None before step()")
    assert said.filename == __file__
    assert private.steps_done == 3


@cases("private", [True, False])
def test_other_clipping_is_left_alone(private: bool) -> None:
    run = start(**PRIVATE)
    plain = Classifier()
    if not private:
        run.detach()
        plain = run.model  # type: ignore[assignment]
    plain(torch.ones(2, 5), torch.zeros(2, dtype=torch.int64))["loss"].backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clip(plain) > 0
        plain.zero_grad()
        assert clip(plain) == 0
