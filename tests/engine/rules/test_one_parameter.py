"""Layers of which one parameter is trained, against one example at a time: `exact_layer` asserts."""

from __future__ import annotations

import torch
from torch import nn

from tests.cases import cases
from tests.engine.rules.exact import exact_layer
from tests.engine.rules.test_recurrent import states

PARTS = [
    *((nn.GroupNorm(2, 6), (6, 5), name) for name in ("weight", "bias")),
    *((nn.Conv2d(2, 3, 3), (2, 5, 5), name) for name in ("weight", "bias")),
    *((nn.GRU(3, 4, batch_first=True), (5, 3), name) for name in ("weight_ih_l0", "weight_hh_l0", "bias_hh_l0")),
]


@cases("layer, shape, trained", PARTS)
def test_one_parameter_alone(layer: nn.Module, shape: tuple[int, ...], trained: str) -> None:
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name == trained)
    call = {"call": states} if isinstance(layer, nn.GRU) else {}
    exact_layer(layer, torch.randn(3, *shape), **call)
