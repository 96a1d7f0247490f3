"""Modules that are frozen in evaluation stay there, whatever the package does with the model for a while."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

import fastdp
from fastdp.calls.modes import in_mode, kept_modes
from tests.cases import cases
from tests.engine.runs import PRIVATE, Classifier, start
from tests.loops import trained


class Normalised(Classifier):
    """With a batch normalisation that scales by known numbers, in evaluation within a model that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.BatchNorm1d(7).requires_grad_(False)
        self.train()
        self.scale.eval()

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.scale(self.first(x))))


@cases("training", [True, False])
def test_each_module_is_put_back_into_its_own_mode(training: bool) -> None:
    model = Normalised()
    with contextlib.suppress(KeyError), in_mode(model, training=training):
        assert {module.training for module in model.modules()} == {training}
        raise KeyError
    with kept_modes(model):
        model.eval()
    assert [name for name, module in model.named_modules() if not module.training] == ["scale"]


def test_a_preparation_leaves_what_is_frozen_as_it_was() -> None:
    method = fastdp.DPFrost(unfreezing_ratio=0.5, selection_noise_multiplier=2.0, selection_rate=0.5, selection_steps=1)
    private = start(Normalised(), method=method, **PRIVATE)
    for _ in trained(private):
        assert not private.model.scale.training
    assert private.steps_done == 3
