"""Collators and data sets that make something of a batch, or of what they were asked before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fastdp.engine.errors import SelfCheckError
from tests.engine.runs import Batch, collate, examples, start


def train(data: list[Any], make: Callable[[Any], Batch] = collate, epochs: int = 6) -> int:
    """Train, with another first example halfway, and give how many logical batches were released."""
    private = start(None, DataLoader(data, batch_size=24, collate_fn=make), epochs=epochs)  # type: ignore[arg-type]
    try:
        for epoch in range(epochs):
            if epoch == epochs // 2:
                data[0] = {"x": torch.full((5,), 1e3), "labels": 0}
            for batch in private.data_loader:
                private.optimizer.zero_grad()
                private.model(**batch)["loss"].backward()
                private.optimizer.step()
        return private.steps_done
    finally:
        private.detach()


def _turned(items: Any) -> Batch:
    batch = collate(items)
    return batch | {"x": -batch["x"]} if batch["x"].abs().max() > 100 else batch


def _centred(items: Any) -> Batch:
    batch = collate(items)
    return batch | {"x": batch["x"] - batch["x"].mean(0)} if len(items) > 12 else batch


def _noisy(items: Any) -> Batch:
    batch = collate(items)
    return batch | {"x": batch["x"] + torch.randn_like(batch["x"])}


class Augmented(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        example = super().__getitem__(index)
        return example | {"x": example["x"] + torch.randn(5)}


class Remembering(list[Any]):
    """After some reads the example before is taken from each."""

    reads, before = 0, torch.zeros(5)

    def __getitem__(self, index: Any) -> Any:
        example = super().__getitem__(index)
        self.reads += 1
        shift, self.before = self.before, example["x"]
        return example | {"x": example["x"] - shift} if self.reads > 400 else example


@pytest.mark.parametrize("make", [_turned, _centred])
def test_what_a_collator_makes_of_a_batch_is_looked_at_in_each(make: Callable[[Any], Batch]) -> None:
    with pytest.raises(SelfCheckError, match="in company than alone"):
        train(examples(24), make)


def test_data_that_begin_to_remember_are_refused() -> None:
    with pytest.raises(SelfCheckError, match="after others were read"):
        train(Remembering(examples(24)), epochs=60)


def test_rows_on_their_own_are_taken_drawn_by_chance_or_not() -> None:
    assert [train(examples(24)), train(examples(24), _noisy), train(Augmented(examples(24)))] == [6, 6, 6]
