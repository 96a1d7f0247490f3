"""One layer of a kind under test between an input and a loss, and the engine's step on it against float64 autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastdp.engine.engine import Engine
from tests.engine.reference import Recording, norms, stepped
from tests.engine.runs import CLASSES, Batch, clipped_sum, error, one_by_one

#: The worst relative error of norms and sums against float64, in float32 arithmetic.
TOLERANCE = 1e-5


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


def exact_layer(
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
    return exact_step(Net(layer, x, call).train(), {"x": x, "labels": torch.arange(len(x)) % CLASSES}, route, two_pass)


def exact_step(model: nn.Module, batch: Batch, route: str = "uses", two_pass: bool = False) -> Engine:
    """One clipped step of a model that returns its loss, against float64 autograd on each row alone."""
    rows = len(next(iter(batch.values())))
    truth = one_by_one(model, batch)
    true = norms(truth)
    engine = stepped(model, batch, float(true.median()), two_pass=two_pass)
    assert engine.route == route, engine.reason
    passes = slice(-rows, None) if route == "one-example" else slice(-1, None)
    seen, given = (torch.cat([r[0] for r in values[passes]]).double() for values in (Recording.seen, Recording.given))
    assert float(((seen - true).abs() / true).max()) < TOLERANCE
    expected = {name: sum(s * g[name] for s, g in zip(given, truth)) for name in truth[0]}
    sums = {n: engine.accumulator.sums.get(n, torch.zeros_like(e)) for n, e in expected.items()}
    assert error(sums, expected) < TOLERANCE
    assert error(clipped_sum(truth, engine.accumulator.policy.bounds[0]), expected) < 2e-3
    return engine
