"""Torch's loss functions within a forward pass keep what their arguments mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastdp.engine.loss.losses import LossTerms, intercepted, masked_mean
from tests.cases import cases, pairs
from tests.engine.reference import ticket

ROWS = 3
BINARY = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
CALLS: dict[str, Any] = {
    "cross_entropy": lambda x, **options: F.cross_entropy(x, torch.tensor([0, 1, 0]), **options),
    "mse_loss": lambda x, **options: F.mse_loss(x, BINARY, **options),
    "binary_cross_entropy_with_logits": lambda x, **options: F.binary_cross_entropy_with_logits(x, BINARY, **options),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@cases(*pairs(("name", CALLS), ("options", [{"reduce": False}, {"size_average": False}, {"size_average": True}, {}])))
def test_older_arguments_say_how_losses_are_reduced(name: str, options: dict[str, bool]) -> None:
    x = torch.linspace(-1, 1, 2 * ROWS).view(ROWS, 2).requires_grad_()
    wanted = CALLS[name](x, **options)
    terms = LossTerms(ticket(ROWS).layout(x.device))
    with intercepted(terms):
        found = CALLS[name](x, **options)
    torch.testing.assert_close(found, wanted)
    assert len(terms.terms) == (wanted.dim() == 0)
    if terms.terms:
        total = terms.terms[0].per_unit.sum() if options == {"size_average": False} else terms.terms[0].per_unit.mean()
        torch.testing.assert_close(total, wanted)


@cases("reduction", ["mean", "sum", "none"])
def test_a_sequence_loss_is_divided_by_the_length_of_its_own_target(reduction: str) -> None:
    scores = torch.linspace(-1, 1, 8 * ROWS * 4).view(8, ROWS, 4).requires_grad_()
    lengths, targets = torch.tensor([1, 3, 2]), torch.tensor([[1, 1, 1], [1, 2, 3], [3, 2, 1]])

    def loss() -> torch.Tensor:
        return F.ctc_loss(scores.log_softmax(-1), targets, torch.full((ROWS,), 8), lengths, reduction=reduction)

    terms = LossTerms(ticket(ROWS).layout(scores.device))
    with intercepted(terms):
        found = loss()
    torch.testing.assert_close(found, loss())
    assert len(terms.terms) == (reduction != "none")


def test_padding_and_what_is_not_finite_take_no_part() -> None:
    """In the mean that a loop reads."""
    losses = torch.tensor([1.0, float("nan"), 3.0, 100.0, float("inf")])
    assert float(masked_mean(losses, torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]))) == 2.0
    assert float(masked_mean(losses, torch.zeros(5))) == 0.0
