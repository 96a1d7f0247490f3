"""Every rule under autocast: the forward pass gives what torch's gives, and a unit's gradient is that of torch's on its row.

Norms are computed in float32, as autocast does on a GPU; on a processor torch itself leaves them in the input's dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastdp.engine.routing import Routing
from tests.cases import cases, pairs
from tests.engine.reference import Recording, engine_for, norms, ticket
from tests.engine.rules.exact import Net
from tests.engine.rules.test_recurrent import states
from tests.engine.runs import CLASSES, clipped_sum, error

ROWS = 4
NORMS = ("layer norm", "RMS norm", "group norm", "group norm of 2-d", "instance norm")
#: The rules' own loops over time round in other places than torch's kernels.
LOOPS = ("LSTM", "GRU", "RNN")


def _bag(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer((x.flatten(1).abs() * 10).long() % 7)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x, x, x, need_weights=False)[0]


class Scaled(nn.Module):
    """A matrix and a vector that are read as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) * self.scale


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[..., torch.Tensor] | None]] = {
    "linear": (lambda: nn.Linear(6, 5), (3, 6), None),
    "matmul and a scale": (Scaled, (3, 6), None),
    "embedding": (lambda: nn.Embedding(7, 5), (6,), _bag),
    "embedding bag": (lambda: nn.EmbeddingBag(7, 5), (6,), _bag),
    "layer norm": (lambda: nn.LayerNorm(6), (3, 6), None),
    "RMS norm": (lambda: nn.RMSNorm(6), (3, 6), None),
    "group norm": (lambda: nn.GroupNorm(2, 6), (6, 5), None),
    "group norm of 2-d": (lambda: nn.GroupNorm(3, 6), (6, 3, 4), None),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 7), None),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (4, 7), None),
    "conv2d, grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5), None),
    "conv2d, large": (lambda: nn.Conv2d(24, 40, 3), (24, 4, 4), None),
    "transposed": (lambda: nn.ConvTranspose1d(4, 6, 3), (4, 7), None),
    "LSTM": (lambda: nn.LSTM(3, 5, batch_first=True), (6, 3), states),
    "GRU": (lambda: nn.GRU(3, 5, batch_first=True), (6, 3), states),
    "RNN": (lambda: nn.RNN(3, 5, batch_first=True), (6, 3), states),
    "attention": (Attention, (5, 6), None),
}


@cases(*pairs(("half", [False, True]), ("name", LAYERS)))
def test_under_autocast(name: str, half: bool) -> None:
    torch.manual_seed(0)
    make, shape, given = LAYERS[name]
    x, labels = torch.randn(ROWS, *shape), torch.arange(ROWS) % CLASSES
    seen: list[torch.Tensor] = []
    widened = False

    def call(layer: Any, x: torch.Tensor) -> torch.Tensor:
        # What comes out of a product under autocast is half as precise.
        read = x.bfloat16() if half and given is not _bag else x
        read = read.float() if widened else read
        out = layer(read) if given is None else given(layer, read)
        seen.append(out.detach().clone())
        return out.float()

    with torch.autocast("cpu", torch.bfloat16):
        model = Net(make(), x, call).train()
        plain = copy.deepcopy(model)
        engine, tickets = engine_for(model, 1.0, verify=Routing)
        tickets.append(ticket(ROWS))
        loss = model(x=x, labels=labels)["loss"]
        ours = seen[-1]
        loss.backward()
        assert engine.route == "uses", engine.reason
        widened = name in NORMS
        losses = [plain(x[row : row + 1], labels[row : row + 1])["loss"] for row in range(ROWS)]
        wanted = torch.cat(seen[-ROWS:])
    if name in LOOPS:
        torch.testing.assert_close(ours.float(), wanted.float(), rtol=2**-5, atol=2**-6)
    else:
        assert ours.dtype == wanted.dtype
        sharp = ours.dtype == torch.float32 and name != "RMS norm"
        torch.testing.assert_close(ours, wanted, rtol=1e-5 if sharp else 2**-7, atol=1e-6)
    units = []
    for own in losses:
        found = torch.autograd.grad(own, list(plain.parameters()))
        units.append({n: g.double() for (n, _), g in zip(plain.named_parameters(), found)})
    sizes = norms(units)
    assert float((Recording.seen[-1][0] / sizes - 1).abs().max()) < 2**-6
    assert error(engine.accumulator.sums, clipped_sum(units, 1.0)) < 2**-5
    assert all(total.dtype == torch.float32 for total in engine.accumulator.sums.values())
