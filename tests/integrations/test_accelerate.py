"""accelerate before or after `make_private`: the same loop, the same releases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator

import fastdp
from tests.engine.runs import Classifier, loader


def trained(prepared: str, shuffle: bool) -> list[torch.Tensor]:
    accelerator = Accelerator(cpu=True)
    model: Any = Classifier()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    data: Any = loader(shuffle=shuffle)
    if prepared == "before":
        model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    options: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-3, "epochs": 2, "unsafe_seed": 1}
    private = fastdp.make_private(model, optimizer, data, max_physical_batch_size=3, **options)
    assert private.sample_rate == 8 / 24
    assert list(private) == [model, optimizer, private.data_loader]
    model, optimizer, data = private
    if prepared == "after":
        model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    for batch in (b for _ in range(2) for b in data):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert private.steps_done == 6
    assert private.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**6)
    private.detach()
    return [p.detach().clone() for p in private.model.parameters()]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("prepared", ["before", "after"])
def test_either_order_makes_the_same_releases(prepared: str, shuffle: bool) -> None:
    expected = trained("never", False)
    for one, other in zip(trained(prepared, shuffle), expected, strict=True):
        assert torch.equal(one, other)
