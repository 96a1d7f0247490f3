"""What is drawn at random: from a seed where passes are repeated, from the operating system where nobody may know masks."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import fastdp
from fastdp.calls.randomness import BufferSnapshot, seed_from_os, seeded
from tests.cases import cases
from tests.engine.runs import Batch, Classifier, collate, examples


def drawn() -> tuple[Any, ...]:
    return *torch.rand(4).tolist(), random.random(), random.gauss(0, 1), *numpy.random.rand(2)  # noqa: NPY002


@cases("context", [seed_from_os, lambda: seeded(3)])
def test_states_are_restored(context: Any) -> None:
    with seeded(7):
        without = drawn()
    with seeded(7):
        with context():
            drawn()
        assert drawn() == without


def test_draws_from_the_operating_system_never_repeat() -> None:
    seen = set()
    for _ in range(20):
        with seeded(7), seed_from_os():
            seen.update(drawn())
    assert len(seen) == 20 * 8


def test_buffers_are_restored_where_they_were_written_or_replaced() -> None:
    model = torch.nn.BatchNorm1d(3)
    mean, variance = model.running_mean, model.running_var
    snapshot = BufferSnapshot(model)
    for _ in range(2):
        model(torch.randn(4, 3))
        model.running_var = torch.zeros(3)
        snapshot.restore()
        assert model.running_mean is mean
        assert model.running_var is variance
        assert not mean.any()
        assert bool((variance == 1).all())


class Dropping(Classifier):
    """Notes the mask of each row."""

    masks: list[torch.Tensor]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        mask = F.dropout(torch.ones_like(x), 0.5, self.training)
        if torch.is_grad_enabled():
            self.masks.append(mask)
        return super().logits(x * mask)


def masks(**options: Any) -> tuple[list[torch.Tensor], list[Batch]]:
    """Of the micro-batches of an epoch that begins with a seed, and what the collator drew for each."""
    torch.manual_seed(0)
    model = Dropping()
    model.masks = []
    drawn: list[Batch] = []

    def noisy(items: Any) -> Batch:
        batch = collate(items)
        return {**batch, "x": batch["x"] + torch.randn_like(batch["x"])}

    loader = DataLoader(examples(), batch_size=24, collate_fn=noisy)
    torch.manual_seed(0)
    private = fastdp.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=1, self_check=False, **options
    )
    for batch in private.data_loader:
        drawn.append(batch)
        model.masks.clear()
        private.model(**batch)["loss"].backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
    private.detach()
    return list(model.masks), drawn


def test_a_seed_that_others_know_tells_no_mask_and_no_augmentation() -> None:
    """A row's mask would follow from its place, which one record more shifts: the others' shares would move without bound."""
    noised = {"noise_multiplier": 1.0, "target_delta": 1e-3}
    (one, batches), (two, others) = masks(**noised), masks(**noised)
    assert len(one) == len(two) > 0
    assert not any(map(torch.equal, one, two))
    assert not torch.equal(batches[0]["x"][0], others[0]["x"][0])
    for reproducible in ({"noise_multiplier": 0.0}, {**noised, "unsafe_seed": 3}):
        (one, batches), (two, others) = masks(**reproducible), masks(**reproducible)
        assert all(map(torch.equal, one, two))
        assert torch.equal(batches[0]["x"], others[0]["x"])
