"""Probes restore buffers and random states, and change nothing else of a model."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn

from fastdp.calls.batches import cropped
from fastdp.calls.modes import rounding
from fastdp.calls.randomness import DropoutDisabled
from tests.cases import cases
from tests.engine.models import batch, build
from tests.engine.nets import Net, trained
from tests.engine.reference import engine_for, ticket
from tests.engine.runs import collate, examples


class Drawing(Net):
    """Draws from every generator of the host, and writes a buffer that no state dict saves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        self.passes += 1
        h = torch.tanh(self.first(x)) * (torch.rand(len(x), 1) + random.random() + float(numpy.random.rand()))  # noqa: NPY002
        return {"loss": F.cross_entropy(self.second(h), labels)}


def test_a_first_batch_draws_as_often_as_one_forward_pass() -> None:
    states = []
    for verified in (True, False):
        model, data = Drawing(), collate(examples(6))
        torch.manual_seed(3)
        random.seed(3)
        numpy.random.seed(3)  # noqa: NPY002
        if verified:
            trained(model, data)
        else:
            model(**data)
        assert float(model.passes) == 1
        states.append((torch.rand(3).tolist(), random.random(), numpy.random.rand()))  # noqa: NPY002
    assert states[0] == states[1]


@cases("name", ["bert", "llama", "gpt2"])
def test_hidden_states_are_those_of_the_plain_model(name: str) -> None:
    plain, model, data = build(name), build(name), {**batch(name), "output_hidden_states": True}
    engine, tickets = engine_for(model, 0.5)
    wanted = plain(**data).hidden_states
    for _ in range(2):
        engine.abandon()
        tickets.clear()
        tickets.append(ticket(4))
        output = model(**data)
        output.loss.backward()
        assert len(output.hidden_states) == len(wanted) == 3
    engine.close()
    got = model(**data).hidden_states
    assert len(got) == 3
    assert all(map(torch.equal, got, wanted))


def test_attributes_and_hooks_of_a_model_stay_as_they_were() -> None:
    model = build("bert")

    def described() -> list[Any]:
        found = []
        for module in model.modules():
            names = {k for k in vars(module) if not k.startswith("_") and k != "forward"}
            hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks
            found.append((names, module.training, *map(len, hooks)))
        return found

    model(**batch("bert"))
    before = described()
    trained(model, batch("bert"))
    assert described() == before


def test_dropout_is_disabled_without_a_change_of_its_module() -> None:
    layer, x = nn.MultiheadAttention(8, 2, dropout=0.9, batch_first=True), torch.randn(2, 3, 8)
    modules = nn.Sequential(nn.Dropout(0.9), nn.AlphaDropout(0.9), nn.Dropout1d(0.9)).train()
    with DropoutDisabled():
        assert torch.equal(modules(x), x)
        assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
        assert torch.equal(F.scaled_dot_product_attention(x, x, x, None, 0.9), F.scaled_dot_product_attention(x, x, x))
    assert not torch.equal(modules(x), x)
    assert modules[0].p == 0.9


def test_tensors_of_other_lengths_are_compared_where_they_agree() -> None:
    row = torch.arange(4.0)
    for padded in (F.pad(row, (3, 0), value=9.0), F.pad(row, (0, 3), value=9.0)):
        assert torch.equal(*cropped(padded, row))


def test_rounding_follows_the_least_precise_parameters() -> None:
    models = [nn.Linear(2, 2).to(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    limits = list(map(rounding, models))
    assert limits == sorted(limits)
    assert rounding(nn.Sequential(*models)) == limits[-1]
    with torch.autocast("cpu", torch.bfloat16):
        assert rounding(models[0]) == limits[-1]
