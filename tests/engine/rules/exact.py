"""One layer of a kind under test between an input and a loss, and the engine's step on it against float64 autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastdp.engine.engine import Engine
from tests.engine.reference import assert_exact_step
from tests.engine.runs import CLASSES


class Net(nn.Module):
    """``layer`` applied to x by ``call``, and a linear head over what it returns."""

    def __init__(self, layer: nn.Module, x: torch.Tensor, call: Callable[[nn.Module, Any], Any]):
        super().__init__()
        self.layer, self.call = layer, call
        with torch.no_grad():
            width = call(layer, x[:1]).flatten(1).shape[1]
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = torch.tanh(self.call(self.layer, x)).flatten(1)
        return {"loss": F.cross_entropy(self.out(hidden), labels)}


def assert_exact_layer(
    layer: nn.Module,
    x: torch.Tensor,
    *,
    call: Callable[[nn.Module, Any], Any] = lambda layer, x: layer(x),
    route: str = "uses",
    two_pass: bool = False,
) -> Engine:
    """One clipped step of a `Net`, whose norms and sums must be those of one example at a time in float64."""
    torch.manual_seed(len(x))
    with torch.no_grad():
        for parameter in layer.parameters():
            # Ones and zeros that layers begin with would hide errors.
            parameter.add_(0.3 * torch.randn_like(parameter))
    batch = {"x": x, "labels": torch.arange(len(x)) % CLASSES}
    return assert_exact_step(Net(layer, x, call).train(), batch, route=route, two_pass=two_pass)
