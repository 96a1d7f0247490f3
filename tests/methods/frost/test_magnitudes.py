"""Magnitudes against Definition 8 (MGNA), and what one example can move against Lemma 3."""

import functools
from collections import deque
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp.engine.engine import Engine
from fastdp.engine.routing import Routing
from fastdp.engine.uses.layout import Ticket
from fastdp.methods.frost import Partition, split
from fastdp.methods.frost.accumulate import MagnitudeAccumulator, magnitude_bound
from tests.cases import cases
from tests.engine import models, reference
from tests.engine.runs import one_by_one

Gradient = Mapping[str, torch.Tensor]


def defined(gradients, partitions, max_grad_norm):
    """Definition 8 written out with L1 norms, in float64."""
    bound = max_grad_norm / (sum(p.size for p in partitions) / len(partitions))
    total = torch.zeros(len(partitions), dtype=torch.float64)
    for gradient in gradients:
        sizes = [sum(gradient[n].double().abs().sum() for n in p.parameters) / p.size for p in partitions]
        total += torch.stack(sizes) * min(1.0, bound / float(sum(sizes)))
    return total


def accumulate(model, batch, ticket, max_grad_norm):
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    accumulator = MagnitudeAccumulator(parameters, split(parameters), max_grad_norm)
    engine = Engine(model, accumulator.policy, deque([ticket]), accumulator=accumulator)
    model(**batch).loss.backward()
    engine.close()
    assert not accumulator.sums
    return accumulator.magnitudes, engine


@functools.cache
def one_at_a_time(name):
    """Gradients by autograd of each example of a model's batch."""
    return one_by_one(models.build(name), models.batch(name))


def close(found, expected):
    return torch.allclose(found, expected, rtol=2e-4, atol=1e-5 * float(expected.max()))


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "llama"])
def test_magnitudes_are_those_of_the_definition(name):
    """Tied tables (gpt2), a patch convolution and a class token (vit), shared inputs, padding: all of them."""
    model, batch = models.build(name), models.batch(name)
    partitions, gradients = split(dict(model.named_parameters())), one_at_a_time(name)
    # A threshold that clips some of these examples and leaves others whole.
    norms = sorted(float(defined([gradient], partitions, 1e12).sum()) for gradient in gradients)
    max_grad_norm = 1.001 * norms[1] / magnitude_bound(partitions, 1.0)
    found, engine = accumulate(model, batch, reference.ticket(4), max_grad_norm)
    assert engine.route == "uses"
    assert close(found, defined(gradients, partitions, max_grad_norm))


def test_the_one_example_route_agrees(monkeypatch):
    first, _ = accumulate(models.build("bert"), models.batch("bert"), reference.ticket(4), 3.0)
    monkeypatch.setattr(Routing, "_try_uses", lambda *_: "for this test")
    with pytest.warns(UserWarning, match="one-example"):
        second, engine = accumulate(models.build("bert"), models.batch("bert"), reference.ticket(4), 3.0)
    assert engine.route == "one-example"
    assert torch.allclose(first, second, rtol=1e-4, atol=1e-9)


def test_users_and_padding():
    """A user's examples are clipped as one, and a padding row counts for nothing."""
    model, batch = models.build("bert"), models.batch("bert", rows=4)
    users = Ticket(torch.tensor([0, 0, 1, 2]), torch.tensor([1.0, 0.0, 0.0]), is_last=True)
    found, _ = accumulate(model, batch, users, 2.0)
    each = one_at_a_time("bert")
    together = {n: each[0][n] + each[1][n] for n in each[0]}
    assert close(found, defined([together], split(dict(model.named_parameters())), 2.0))


SHAPES = {"a": (2, 3), "b": (4,), "c": (1,)}
PARAMETERS = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
PARTITIONS = split(PARAMETERS)


def released(gradients, max_grad_norm):
    """What would be released before noise."""
    accumulator = MagnitudeAccumulator(PARAMETERS, PARTITIONS, max_grad_norm)
    for gradient in gradients:
        accumulator.add_unit(gradient, torch.ones(1))
    return accumulator.magnitudes


def drawn(rng, scale):
    """A gradient of random signs, its mass spread over some of the partitions only."""
    weights = rng.choice([0.0, 1e-3, 1.0, 1e3], size=3)
    return {
        name: torch.from_numpy(rng.standard_normal((1, *shape)) * weight * scale).float()
        for (name, shape), weight in zip(SHAPES.items(), weights)
    }


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32 - 1), others=st.integers(0, 2), scale=st.sampled_from([1e-2, 1.0, 1e2]))
def test_one_example_moves_the_magnitudes_by_no_more_than_stated(seed, others, scale):
    rng = np.random.default_rng(seed)
    max_grad_norm = float(rng.choice([0.1, 1.0, 10.0]))
    shared = [drawn(rng, scale) for _ in range(others)]
    one, other = drawn(rng, scale), drawn(rng, scale)
    without, first, second = (released([*shared, *more], max_grad_norm) for more in ([], [one], [other]))
    most = magnitude_bound(PARTITIONS, max_grad_norm) * (1 + 1e-5)
    assert float((first - without).norm()) <= most
    assert float((first - second).norm()) <= 2 * most
    one["b"][0, 0] = float("nan") if seed % 2 else float("inf")
    assert torch.equal(released([*shared, one], max_grad_norm), without)


def test_the_sensitivity_is_reached():
    """A gradient in the smallest partition alone moves the vector by all of it, so the bound is not loose."""
    gradient = {n: torch.zeros(1, *shape) for n, shape in SHAPES.items()}
    gradient["c"] += 1e3
    assert float(released([gradient], 1.0).norm()) == pytest.approx(magnitude_bound(PARTITIONS, 1.0), rel=1e-5)


@cases(("sizes", "bound"), [([4, 16, 100], 2 / 40), ([10, 30], 2 / 20), ([30], 2 / 30)])
def test_the_bound_of_lemma_3_is_of_the_partitions_that_remain(sizes, bound):
    assert magnitude_bound([Partition("", (), size) for size in sizes], 2.0) == pytest.approx(bound)
