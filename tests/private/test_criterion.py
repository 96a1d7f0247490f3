"""A criterion that gives one loss a row: none of them may be another for what else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastdp
from fastdp.engine.errors import SelfCheckError
from fastdp.private.run import Private
from tests.cases import cases, pairs
from tests.engine.runs import (
    CLASSES,
    FEATURES,
    Batch,
    Classifier,
    clipped_sum,
    error,
    examples,
    loader,
    one_by_one,
    start,
)
from tests.verify.test_loop import Logits, row_losses as losses


def skipping(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Leaves a batch out whose mean is large."""
    found = losses(logits, batch)
    return found * (found.detach().mean() < 20)


def far(data: list[dict[str, Any]]) -> None:
    data[5] = {"x": torch.full((FEATURES,), 1e4), "labels": 1}


class Linear(Logits):
    """Whose losses grow with their records."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.eye(FEATURES, CLASSES) * 2 + self.second(self.first(x))


def steps(private: Private, make: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss) -> list[Batch]:
    summed = []
    for batch in private.data_loader:
        tried = private.data_loader.tickets[0].probe
        private.optimizer.zero_grad()
        make(private.loss(private.model(batch["x"]), batch)).backward()
        private.optimizer.step()
        summed += [] if tried else [batch]
        if private.last_step_done:
            break
    return summed


def test_a_batch_that_is_left_out_for_one_row_is_refused() -> None:
    data = examples(8)
    private = start(Linear(), loader(data), criterion=skipping, epochs=4)
    for _ in range(2):
        steps(private)
    far(data)
    with pytest.raises(SelfCheckError, match="example has another gradient"):
        steps(private)
    assert private.steps_done == 2


@cases("make", [lambda loss: loss.clamp(max=20.0), lambda loss: -(loss - 20).abs()])
def test_a_mean_that_is_left_out_or_turned_round_is_refused(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    data = examples(8)
    private = start(Linear(), loader(data), criterion=losses, epochs=4)
    steps(private, make)
    far(data)
    with pytest.raises(ValueError, match="was scaled by -?[01].0 before backward"):
        steps(private, make)
    assert private.steps_done == 1


@cases(*pairs(("make", [lambda loss: loss, lambda loss: loss * 7, lambda loss: loss**3, torch.log]), ("most", [8, 3])))
def test_what_a_loop_makes_of_the_mean_is_divided_out(make: Callable[[torch.Tensor], torch.Tensor], most: int) -> None:
    private = start(
        Logits(), criterion=losses, method=fastdp.DPSGD(max_grad_norm=0.5), max_physical_batch_size=most, epochs=1
    )
    summed = steps(private, make)
    plain = Classifier()
    truth = [gradient for batch in summed for gradient in one_by_one(plain, batch)]
    got = {n: 8 * p.grad for n, p in private.model.named_parameters() if p.grad is not None}
    assert error(got, clipped_sum(truth, 0.5)) < 1e-4
