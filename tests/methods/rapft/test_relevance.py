"""Relevance of trained parameters in stock models: conservation, agreement of routes, and what has no relevance."""

from __future__ import annotations

import copy

import pytest
import torch

from fastdp.methods.rapft import Initialisation, Propagation, Propagator, relevance as relevances, warm_up
from fastdp.methods.rapft.relevance import require_values
from tests.cases import cases
from tests.engine.models import batch, build

MODELS = [
    *(("gpt2", tuning) for tuning in ("lora", "bottleneck", "bitfit", "full")),
    *(("llama", tuning) for tuning in ("lora", "bottleneck", "full")),
    *(("bert", tuning) for tuning in ("lora", "bottleneck", "bitfit", "full")),
]


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def propagator(model: torch.nn.Module, rule: str = "epsilon", **options) -> Propagator:
    settings = {"rule": "alpha_beta", "positive_after_activation": True} if rule == "equation 7" else {"rule": rule}
    return Propagator(model, trained(model), Propagation(**settings), **options)


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    size = max(float(value.abs().max()) for value in b.values())
    return max(float((a[name] - b[name]).abs().max()) for name in b) / size


@cases(
    ("name", "tuning", "rule"),
    [
        *((name, tuning, "epsilon") for name, tuning in MODELS),
        *((name, "full", "alpha_beta") for name in ("gpt2", "llama", "bert")),
        *((name, "full", "equation 7") for name in ("gpt2", "bert")),
    ],
)
def test_relevance_is_conserved_and_does_not_depend_on_the_batch(name, tuning, rule):
    """Equation 9 in float64, up to RMS norms, which compute in float32; then an example alone against it in a batch."""
    model = build(name, tuning).double()
    found = propagator(model, rule)
    data = batch(name)
    if rule == "equation 7":
        # Some layer of a stock model does read an activation's output.
        assert gap(found.total(data), propagator(model, "alpha_beta").total(data)) > 1e-3
    assert found.conservation(data).error < 1e-6
    (maps,) = found.examples(data)
    (alone,) = found.examples({key: value[1:2] for key, value in data.items()})
    assert gap({n: m[0] for n, m in alone.items()}, {n: m[1] for n, m in maps.items()}) < 1e-5
    # BERT's soft pooling and key biases aside, something reaches every kind of parameter.
    assert sum(bool(m.any()) for m in maps.values()) > 0.8 * len(maps)


@cases("name", ["gpt2", "llama", "bert"])
def test_maps_of_bfloat16_weights_are_those_of_the_same_weights_in_float32(name):
    """A message is rounded to 8 bits some dozens of times: a quarter is far from that, and from what has lost its rule."""
    model, data = build(name).bfloat16(), batch(name)
    (rounded,), (exact,) = (propagator(m, "alpha_beta").examples(data) for m in (model, copy.deepcopy(model).float()))
    found, wanted = (torch.cat([maps[key].reshape(-1) for key in exact]) for maps in (rounded, exact))
    assert float((found - wanted).norm() / wanted.norm()) < 0.25


def test_relevance_of_a_parameter_is_its_value_times_its_message():
    """Equation 13 for the head of a BERT, whose inputs can be had from outside."""
    model = build("bert", "full").double().eval()
    data = batch("bert")
    pooled = []
    model.classifier.register_forward_pre_hook(lambda module, args: pooled.append(args[0].detach()))
    found = propagator(model).total(data)
    x, labels = pooled[-1], data["labels"]
    weight, bias = model.classifier.weight.detach(), model.classifier.bias.detach()
    z = x @ weight.t() + bias
    start = torch.nn.functional.one_hot(labels, 3) / (z + 1e-3 * z.sign())
    messages = start * z.abs() / (z.abs() + 1e-3)
    assert torch.allclose(found["classifier.weight"].double(), weight * (messages.t() @ x), rtol=1e-5, atol=1e-7)
    assert torch.allclose(found["classifier.bias"].double(), bias * messages.sum(0), rtol=1e-5, atol=1e-7)


@cases("name", ["gpt2", "llama", "bert"])
def test_attention_implementations_agree(name):
    model = build(name, "lora").double()
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    data = batch(name)
    assert gap(propagator(other).total(data), propagator(model).total(data)) < 1e-5


def test_the_nucleus_of_everything_is_the_whole_softmax():
    model, data = build("gpt2", "lora"), batch("gpt2")
    whole = propagator(model, initialisation=Initialisation("naive")).total(data)
    assert gap(propagator(model, initialisation=Initialisation(p=1.0)).total(data), whole) < 1e-4
    assert gap(propagator(model, initialisation=Initialisation(p=0.01)).total(data), whole) > 1e-2


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


def test_a_long_batch_is_cut(monkeypatch):
    model, data = build("gpt2", "lora"), batch("gpt2", rows=5)
    (whole,) = propagator(model).examples(data)
    assert gap({n: m.sum(0) for n, m in whole.items()}, propagator(model).total(data)) < 1e-5
    size = sum(p.numel() for p in trained(model).values())
    monkeypatch.setattr(relevances, "PASS_NUMBERS", 2 * size)
    parts = list(propagator(model).examples(data))
    assert [next(iter(part.values())).shape[0] for part in parts] == [2, 2, 1]
    assert gap({n: torch.cat([part[n] for part in parts]) for n in whole}, whole) < 1e-4


def test_the_model_is_left_as_it_was():
    model, data = build("gpt2", "bottleneck"), batch("gpt2")
    for parameter in trained(model).values():
        parameter.grad = torch.ones_like(parameter)
    forwards = [module.forward for module in model.modules()]
    propagator(model).total(data)
    assert model.training
    assert all(bool((p.grad == 1).all()) for p in trained(model).values())
    assert [module.forward for module in model.modules()] == forwards


@pytest.mark.parametrize("tuning", ["lora", "bottleneck"])
def test_what_starts_at_zero_is_refused_until_it_is_warm(tuning):
    model, data = build("gpt2", tuning), batch("gpt2")
    last = [p for name, p in trained(model).items() if "lora_B" in name or "bottleneck_up" in name]
    with torch.no_grad():
        for parameter in last:
            parameter.zero_()
    assert not any(m.any() for m in propagator(model).total(data).values())
    with pytest.raises(ValueError, match="zero throughout.*map_after"):
        require_values(trained(model))
    warm_up(model, [data], steps=2)
    require_values(trained(model))
    assert all(m.any() for m in propagator(model).total(data).values())


def test_warm_up_needs_batches_and_a_loss():
    model, data = build("gpt2", "lora"), batch("gpt2")
    with pytest.raises(ValueError, match="there are none"):
        warm_up(model, [])
    with pytest.raises(ValueError, match="no loss"):
        warm_up(model, [{"input_ids": data["input_ids"]}])


class NoLogits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        return {"loss": self.layer(x).sum()}


class Hidden(NoLogits):
    """Reads its matrix through an operation for which there is no rule."""

    def forward(self, x):
        return {"logits": torch.einsum("bi,oi->bo", x, self.layer.weight)}


def test_refusals():
    with pytest.raises(ValueError, match="returns none"):
        propagator(NoLogits()).total({"x": torch.randn(2, 3)})
    with pytest.raises(ValueError, match="cannot be propagated"):
        propagator(Hidden()).total({"x": torch.randn(2, 3)})
    with pytest.raises(ValueError, match="mappings"):
        propagator(NoLogits()).total([torch.randn(2, 3)])
