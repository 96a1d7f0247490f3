"""The engine's norms and sums of a few rows are compared with plain autograd's: a wrong rule is found by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastdp.engine.bounds import Norms
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.routing import Routing
from tests.engine.nets import EXACT, Net, trained
from tests.engine.reference import stepped
from tests.engine.runs import Batch, clipped_sum, collate, error, examples, one_by_one

BOUND = 0.5


def wrong_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that adds one parameter's gradient 1% too large."""
    run = Accumulator.run

    def off(self: Accumulator, *args: Any, **options: Any) -> None:
        before = {n: t.clone() for n, t in self.sums.items()}
        run(self, *args, **options)
        name = "second.weight"
        self.sums[name] += 0.01 * (self.sums[name] - before.get(name, 0.0))

    monkeypatch.setattr(Accumulator, "run", off)


def wrong_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that gives every squared norm twice."""
    add = Norms.add_rows
    monkeypatch.setattr(Norms, "add_rows", lambda self, groups, squares, *a: add(self, groups, 2 * squares, *a))


@pytest.mark.parametrize("wrong", [wrong_sums, wrong_norms])
def test_a_wrong_rule_is_found_and_not_used(
    wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = collate(examples(6))
    truth = clipped_sum(one_by_one(Net(), data), BOUND)
    wrong(monkeypatch)
    # Without verification it would be used.
    assert error(stepped(Net(), data, BOUND, verify=Routing).accumulator.sums, truth) > 1e-3
    engine = trained(Net(), data, BOUND)
    assert engine.route == "one-example"
    assert "no rule fits" in str(engine.reason)
    # The one-example route bounds its norms by the same rule.
    assert wrong is wrong_norms or error(engine.accumulator.sums, truth) < EXACT


class Words(nn.Module):
    """Token by token, with something done to the embeddings of the whole batch."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.between = nn.Embedding(11, 6), nn.Linear(6, 11), between

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.between(self.table(ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, -2), labels.flatten())}


def sentences() -> Batch:
    ids = torch.randint(0, 11, (5, 6), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": ids}


class Leaking(torch.autograd.Function):
    """Returns its input, and adds a little of the other rows' gradients to each row's."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 1e-4 * gradient.nan_to_num().mean(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_gradient_that_reaches_other_rows_is_refused_however_small(dtype: torch.dtype, frozen: bool) -> None:
    """No loss changes, and gradients change by less than rounding; those at other rows are not zero all the same."""
    model = Words(Leaking.apply).to(dtype)
    model.table.weight.requires_grad_(not frozen)
    with pytest.raises(SelfCheckError, match="couple examples"):
        trained(model, sentences())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_and_dropout_are_no_wrong_rule(dtype: torch.dtype) -> None:
    model = Words(lambda h: F.dropout(h, 0.5)).to(dtype)
    engine = trained(model, sentences())
    assert engine.route == "uses", engine.reason


class Bag(nn.Module):
    """The sum of a text's tokens, each through one matrix of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 80, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return {"loss": F.binary_cross_entropy_with_logits(self.layer(x).sum((1, 2)) / 80**0.5, y)}


@pytest.mark.parametrize("ratio", [1e5, 1e6])
def test_tokens_that_cancel_are_no_wrong_rule(ratio: float) -> None:
    """Where rounding hides a unit's gradient, its route was left, and the bounds of all others moved with it."""
    generator = torch.Generator().manual_seed(2)
    base, kept = (F.normalize(torch.randn(12, 1, 8, generator=generator), dim=2) for _ in range(2))
    signs = torch.tensor([1.0, -1.0]).repeat(4)[:, None]
    x = ratio * base * signs + kept / 8
    engine = trained(Bag(), {"x": x, "y": torch.ones(12)})
    assert engine.route == "uses", engine.reason
