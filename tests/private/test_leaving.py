"""What leaves a run whose device has not said yet whether weights were moved outside of a release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fastdp.engine.guard as engine_guard
import pytest
import torch
from fastdp.engine.sent import Sent

from fastdp.private.run import Private
from tests.engine.runs import logical_step, start


class Late(Sent):
    """Values of a processor that arrive as late as a GPU's."""

    def __init__(self, values: torch.Tensor):
        super().__init__(values.clone())
        self.there = False


def moved(monkeypatch: pytest.MonkeyPatch) -> tuple[Private, dict[str, Any]]:
    """A run that wrote to a weight before its second release, and a state from before that."""
    monkeypatch.setattr(engine_guard, "Sent", Late)
    private = start(epochs=4)
    logical_step(private)
    state = private.state_dict()
    private.model.first.weight.data.add_(1.0)
    logical_step(private)
    return private, state


def _averaged(private: Private, state: Any) -> None:
    with private.averaged():
        pass


LEAVING: dict[str, Callable[[Private, Any], Any]] = {
    "step": lambda private, state: logical_step(private),
    "card": lambda private, state: private.card(),
    "state": lambda private, state: private.state_dict(),
    "weights": lambda private, state: private.model.state_dict(),
    "average": _averaged,
    "pass": lambda private, state: next(iter(private.data_loader)),
    "load": lambda private, state: private.load_state_dict(state),
    "detach": lambda private, state: private.detach(),
}


@pytest.mark.parametrize("how", LEAVING)
def test_a_write_before_a_release_is_told_before_anything_leaves(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    private, state = moved(monkeypatch)
    with pytest.raises(RuntimeError, match="first.weight was changed outside of a release"):
        LEAVING[how](private, state)
    if how == "detach":
        private.model.state_dict()
    elif how != "load":
        with pytest.raises(RuntimeError, match="first.weight was changed outside of a release"):
            logical_step(private)
    else:
        logical_step(private)


def test_whoever_was_told_may_load_or_detach(monkeypatch: pytest.MonkeyPatch) -> None:
    private, state = moved(monkeypatch)
    with pytest.raises(RuntimeError, match="first.weight was changed outside of a release"):
        private.card()
    private.load_state_dict(state)
    logical_step(private)
    private.detach()
