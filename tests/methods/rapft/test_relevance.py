"""Relevance of trained parameters in stock models: conservation, agreement of routes, and what has no relevance."""

import copy

import pytest
import torch

from fastdp.methods.rapft import Initialisation, Propagation, Propagator
from tests.cases import cases
from tests.engine.models import batch, build

MODELS = [
    *(("gpt2", tuning) for tuning in ("lora", "full")),
    *(("llama", tuning) for tuning in ("bottleneck", "full")),
    *(("bert", tuning) for tuning in ("bitfit", "full")),
]


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def propagator(model, **options):
    return Propagator(model, trained(model), **options)


def gap(a, b):
    size = max(float(value.abs().max()) for value in b.values())
    return max(float((a[name] - b[name]).abs().max()) for name in b) / size


@cases(("name", "tuning"), MODELS)
def test_maps_of_examples_add_up_to_that_of_their_batch(name, tuning):
    model, data = build(name, tuning).double(), batch(name)
    maps = list(propagator(model).examples(data))
    assert len(maps) == len(data["input_ids"])
    assert gap({n: sum(m[n][0] for m in maps) for n in maps[0]}, propagator(model).total(data)) < 1e-5
    # BERT's soft pooling and key biases aside, something reaches every kind of parameter.
    assert sum(any(bool(m[n].any()) for m in maps) for n in maps[0]) > 0.8 * len(maps[0])


@cases(("name", "uses"), [("llama", 1), ("bert", 1), ("gpt2", 2)])
def test_without_biases_the_relevance_of_the_output_arrives_at_the_embeddings(name, uses):
    """Equations 5 and 9 in float64, up to RMS norms, which compute in float32: nothing is lost or made on the way.

    A table that is the head too has the relevance of both its uses.
    """
    model, data = build(name, "full").double(), batch(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.zero_()
    found = propagator(model, propagation=Propagation(epsilon=1e-12), initialisation=Initialisation(1.0)).total(data)
    tables = ("embed_tokens", "_embeddings", "wte", "wpe")
    arrived = sum(float(m.sum()) for n, m in found.items() if any(table in n for table in tables))
    labels = data["labels"]
    begun = float(len(labels) if labels.dim() == 1 else (labels[:, 1:] != -100).sum())
    assert arrived == pytest.approx(uses * begun, rel=1e-4)


@cases("name", ["gpt2", "llama", "bert"])
def test_maps_of_bfloat16_weights_are_those_of_the_same_weights_in_float32(name):
    """A message is rounded to 8 bits some dozens of times: a quarter is far from that, and from what has lost its rule."""
    model, data = build(name).bfloat16(), batch(name)
    rounded, exact = (propagator(m).total(data) for m in (model, copy.deepcopy(model).float()))
    found, wanted = (torch.cat([maps[key].reshape(-1) for key in exact]) for maps in (rounded, exact))
    assert float((found - wanted).norm() / wanted.norm()) < 0.25


@cases("name", ["gpt2", "llama", "bert"])
def test_attention_implementations_agree(name):
    model = build(name, "lora").double()
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    data = batch(name)
    assert gap(propagator(other).total(data), propagator(model).total(data)) < 1e-5


def test_only_labelled_positions_are_explained():
    model, data = build("gpt2", "bitfit"), batch("gpt2")
    nothing = {**data, "labels": torch.full_like(data["labels"], -100)}
    assert not any(m.any() for m in propagator(model).total(nothing).values())
    shorter = {**data, "labels": data["labels"].clone()}
    shorter["labels"][:, 6:] = -100
    # What comes after the last explained position cannot matter to a causal model.
    changed = {**shorter, "input_ids": shorter["input_ids"].clone()}
    changed["input_ids"][:, 6:] = 5
    assert gap(propagator(model).total(changed), propagator(model).total(shorter)) < 1e-4


def test_the_model_is_left_as_it_was():
    model, data = build("gpt2", "bottleneck"), batch("gpt2")
    for parameter in trained(model).values():
        parameter.grad = torch.ones_like(parameter)
    forwards = [module.forward for module in model.modules()]
    propagator(model).total(data)
    assert model.training
    assert all(bool((p.grad == 1).all()) for p in trained(model).values())
    assert [module.forward for module in model.modules()] == forwards


class NoLogits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        return {"loss": self.layer(x).sum()}


class Contracted(NoLogits):
    """Reads its matrix through an operation for which there is no rule."""

    def forward(self, x):
        return {"logits": torch.einsum("bi,oi->bo", x, self.layer.weight)}


def test_where_no_rule_is_known_relevance_follows_the_derivative():
    model, x = Contracted(), torch.randn(2, 3)
    z = x @ model.layer.weight.detach().t()
    start = torch.nn.functional.one_hot(z.argmax(1), 2) / (z + 1e-3 * z.sign())
    found = propagator(model).total({"x": x})["layer.weight"]
    assert torch.allclose(found, model.layer.weight.detach() * (start.t() @ x), rtol=1e-5)


def test_refusals():
    with pytest.raises(ValueError, match="returns none"):
        propagator(NoLogits()).total({"x": torch.randn(2, 3)})
    with pytest.raises(ValueError, match="mappings"):
        propagator(NoLogits()).total([torch.randn(2, 3)])
