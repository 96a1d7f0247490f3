"""No record moves a sum by more than its bound: the attacks that did, each by the public way in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fastdp
from tests.engine.runs import start

CLIP = 1.0


def moved(model: nn.Module, record: dict[str, torch.Tensor], method: Any = None) -> float:
    """How far one record alone moves the clipped sums of a run without noise, in float64 over all parameters."""
    data = [record]
    private = start(
        model,
        torch.utils.data.DataLoader(data, batch_size=1),  # type: ignore[arg-type]
        noise_multiplier=0.0,
        sampling="shuffled",
        method=fastdp.DPSGD(max_grad_norm=CLIP) if method is None else method,
        epochs=1,
        self_check=False,
    )
    for batch in private.data_loader:
        private.model(**batch)["loss"].backward()
        sums = {name: total.double() for name, total in private._engine.accumulator.sums.items()}
    assert all(bool(torch.isfinite(total).all()) for total in sums.values())
    return float(sum(total.square().sum() for total in sums.values()) ** 0.5)


class Tokens(nn.Module):
    """One layer read at every token, whose gradient at a token is the token's own sign."""

    def __init__(self, width: int, out: int, bias: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(width, out, bias=bias)

    def forward(self, x: torch.Tensor, sign: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        rows = (self.layer(x) * sign.unsqueeze(-1)).sum((1, 2))
        return {"loss": nn.functional.l1_loss(rows, torch.full_like(rows, -1e30))}


class Compared(nn.Module):
    """score(a) - score(b) with one weight."""

    def __init__(self, width: int, out: int):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(width, out, bias=False)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        rows = self.layer(a).sum((1, 2)) - self.layer(b).sum((1, 2))
        return {"loss": nn.functional.l1_loss(rows, torch.full_like(rows, -1e30))}


def cancelling(size: float, gap: float, tokens: int, width: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = size * torch.randn(tokens // 2, width, generator=generator)
    d = gap * torch.randn(tokens // 2, width, generator=generator)
    sign = torch.cat([torch.ones(tokens // 2), -torch.ones(tokens // 2)])
    return {"x": torch.cat([x + d, x]), "sign": sign}


@pytest.mark.parametrize("size", [1e3, 1e4, 1e5, 1e8, 1e12])
@pytest.mark.parametrize(("tokens", "width", "out"), [(2, 64, 64), (16, 256, 192), (64, 33, 200)])
def test_tokens_that_cancel(size: float, tokens: int, width: int, out: int) -> None:
    worst = max(
        moved(Tokens(width, out, bias), cancelling(size, gap, tokens, width))
        for gap in (1e-3 * size, 1e-5 * size, 1e-7 * size, 0.1)
        for bias in (False, True)
    )
    assert worst <= CLIP


@pytest.mark.parametrize("gap", [0.0, 1e-7, 1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("size", [1.0, 1e4, 1e8])
def test_one_weight_used_twice(size: float, gap: float) -> None:
    generator = torch.Generator().manual_seed(2)
    a = size * torch.randn(24, 96, generator=generator)
    b = a + gap * size * torch.randn(24, 96, generator=generator)
    assert moved(Compared(96, 128), {"a": a, "b": b}) <= CLIP
