"""Magnitudes against Definition 8, and what one example can move against Lemma 3."""

import functools
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp.engine.engine import Engine
from fastdp.engine.routing import Routing
from fastdp.engine.uses.layout import Ticket
from fastdp.methods.frost import Magnitude, Partition, split
from fastdp.methods.frost.accumulate import MagnitudeAccumulator
from tests.engine import models, reference

KINDS = ("MG", "MGNA")
Gradient = Mapping[str, torch.Tensor]


def defined(gradients: Sequence[Gradient], partitions: Sequence[Partition], magnitude: Magnitude) -> torch.Tensor:
    """Definition 8 written out with L1 norms, in float64."""
    sizes = [p.size for p in partitions]
    sums = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    bound = magnitude.max_grad_norm
    if magnitude.kind == "MGNA":
        bound /= sum(sizes) / len(sizes)
    for gradient in gradients:
        parts = [torch.cat([gradient[n].double().reshape(-1) for n in p.parameters]) for p in partitions]
        if magnitude.kind == "MGNA":
            parts = [part.abs() / size for part, size in zip(parts, sizes)]
        norm = torch.cat(parts).abs().sum()
        for total, part in zip(sums, parts):
            total += part * min(1.0, bound / float(norm))
    found = torch.stack([total.abs().sum() for total in sums])
    return found if magnitude.kind == "MGNA" else found / torch.tensor(sizes)


def accumulate(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor], ticket: Ticket, magnitude: Magnitude
) -> tuple[MagnitudeAccumulator, Engine]:
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    accumulator = MagnitudeAccumulator(parameters, split(parameters), magnitude)
    engine = Engine(model, accumulator.policy, deque([ticket]), accumulator=accumulator)
    model(**batch).loss.backward()
    engine.close()
    return accumulator, engine


def middle(gradients: Sequence[Gradient], partitions: Sequence[Partition], kind: str) -> Magnitude:
    """A magnitude whose threshold clips some of these examples and leaves others whole."""
    if kind == "MG":
        norms = [float(torch.cat([g.double().reshape(-1) for g in one.values()]).abs().sum()) for one in gradients]
        return Magnitude("MG", sorted(norms)[1] * 1.001)
    wide = Magnitude("MGNA", 1e12)
    norms = [float(defined([gradient], partitions, wide).sum()) for gradient in gradients]
    return Magnitude("MGNA", sorted(norms)[1] * 1.001 * wide.max_grad_norm / wide.bound([p.size for p in partitions]))


@functools.cache
def one_at_a_time(name: str) -> list[dict[str, torch.Tensor]]:
    """Gradients by autograd of each example of a model's batch."""
    model = models.build(name)
    found = reference.one_at_a_time(model, models.batch(name), shift=name in ("gpt2", "llama"))
    return [
        {n: g.expand_as(p) if g.dim() == 0 else g for (n, p), g in zip(model.named_parameters(), one.values())}
        for one in found
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "llama"])
def test_magnitudes_are_those_of_the_definition(name: str, kind: str) -> None:
    """Tied tables (gpt2), a patch convolution and a class token (vit), shared inputs, padding: all of them."""
    model, batch = models.build(name), models.batch(name)
    partitions, gradients = split(dict(model.named_parameters())), one_at_a_time(name)
    magnitude = middle(gradients, partitions, kind)
    accumulator, engine = accumulate(model, batch, reference.ticket(4), magnitude)
    assert engine.route == "uses"
    expected = defined(gradients, partitions, magnitude)
    assert torch.allclose(accumulator.magnitudes(), expected, rtol=2e-4, atol=1e-5 * float(expected.max()))
    if kind == "MGNA":
        assert not accumulator.sums


@pytest.mark.parametrize("kind", KINDS)
def test_the_one_example_route_agrees(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    magnitude = Magnitude(kind, 3.0)  # type: ignore[arg-type]
    first, _ = accumulate(models.build("bert"), models.batch("bert"), reference.ticket(4), magnitude)
    monkeypatch.setattr(Routing, "_try_uses", lambda *_: "for this test")
    with pytest.warns(UserWarning, match="one-example"):
        second, engine = accumulate(models.build("bert"), models.batch("bert"), reference.ticket(4), magnitude)
    assert engine.route == "one-example"
    assert torch.allclose(first.magnitudes(), second.magnitudes(), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_users_and_padding(kind: str) -> None:
    """A user's examples are clipped as one, and a padding row counts for nothing."""
    magnitude = Magnitude(kind, 2.0)  # type: ignore[arg-type]
    model, batch = models.build("bert"), models.batch("bert", rows=4)
    users = Ticket(torch.tensor([0, 0, 1, 2]), torch.tensor([1.0, 0.0, 0.0]), is_last=True)
    found, _ = accumulate(model, batch, users, magnitude)
    each = one_at_a_time("bert")
    together = {n: each[0][n] + each[1][n] for n in each[0]}
    expected = defined([together], split(dict(model.named_parameters())), magnitude)
    assert torch.allclose(found.magnitudes(), expected, rtol=2e-4, atol=1e-5 * float(expected.max()))


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_that_is_not_finite_moves_nothing(kind: str) -> None:
    accumulator = MagnitudeAccumulator(PARAMETERS, PARTITIONS, Magnitude(kind))  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    accumulator.add_unit(_gradient(rng, 1.0), torch.ones(1))
    before = accumulator.magnitudes().clone()
    bad = _gradient(rng, 1.0)
    bad["b"][0, 0] = float("nan")
    accumulator.add_unit(bad, torch.ones(1))
    assert torch.equal(accumulator.magnitudes(), before)


SHAPES = {"a": (2, 3), "b": (4,), "c": (1,)}


def _parameters() -> tuple[dict[str, torch.nn.Parameter], tuple[Partition, ...]]:
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    return parameters, split(parameters)


def _gradient(rng: np.random.Generator, scale: float) -> dict[str, torch.Tensor]:
    """A gradient of random signs, its mass spread over some of the partitions only."""
    weights = rng.choice([0.0, 1e-3, 1.0, 1e3], size=3)
    return {
        name: torch.from_numpy(rng.standard_normal((1, *shape)) * weight * scale).float()
        for (name, shape), weight in zip(SHAPES.items(), weights)
    }


PARAMETERS, PARTITIONS = _parameters()
ONE = torch.ones(1)


def _neighbours(
    shared: Sequence[Gradient], extra: Sequence[Gradient], magnitude: Magnitude
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What would be released before noise for the shared examples, and for them and each extra one."""
    accumulator = MagnitudeAccumulator(PARAMETERS, PARTITIONS, magnitude)
    for gradient in shared:
        accumulator.add_unit(gradient, ONE)
    without = accumulator.magnitudes().clone()
    sums, totals = {n: t.clone() for n, t in accumulator.sums.items()}, accumulator.totals.clone()
    found = []
    for gradient in extra:
        accumulator.sums.update({n: t.clone() for n, t in sums.items()})
        accumulator.totals = totals.clone()
        accumulator.add_unit(gradient, ONE)
        found.append(accumulator.magnitudes().clone())
    return without, found


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32 - 1), others=st.integers(0, 2), scale=st.sampled_from([1e-2, 1.0, 1e2]))
def test_one_example_moves_the_magnitudes_by_no_more_than_stated(
    kind: str, seed: int, others: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    magnitude = Magnitude(kind, float(rng.choice([0.1, 1.0, 10.0])))  # type: ignore[arg-type]
    sizes = [p.size for p in PARTITIONS]
    shared = [_gradient(rng, scale) for _ in range(others)]
    one, other = _gradient(rng, scale), _gradient(rng, scale)
    if shared and rng.random() < 0.3:
        # An example that undoes another is the worst case of signed sums.
        one = {n: -g for n, g in shared[0].items()}
    without, (first, second) = _neighbours(shared, [one, other], magnitude)
    slack = 1 + 1e-5
    assert float((first - without).norm()) <= magnitude.sensitivity(sizes) * slack
    assert float((first - second).norm()) <= 2 * magnitude.sensitivity(sizes) * slack


@pytest.mark.parametrize("kind", KINDS)
def test_the_sensitivity_is_reached(kind: str) -> None:
    """A gradient in the smallest partition alone moves the vector by all of it, so the bound is not loose."""
    magnitude = Magnitude(kind)  # type: ignore[arg-type]
    gradient = {n: torch.zeros(1, *shape) for n, shape in SHAPES.items()}
    gradient["c"] += 1e3
    _, (released,) = _neighbours([], [gradient], magnitude)
    assert float(released.norm()) == pytest.approx(magnitude.sensitivity([p.size for p in PARTITIONS]), rel=1e-5)


def test_sensitivities_of_lemma_3() -> None:
    sizes = [4, 16, 100]
    assert Magnitude("MG", 2.0).sensitivity(sizes) == pytest.approx(2 / 4)
    assert Magnitude("MGNA", 2.0).sensitivity(sizes) == pytest.approx(2 / 40)


def test_the_bound_belongs_to_the_partitions_that_remain() -> None:
    magnitude = Magnitude("MGNA")
    assert magnitude.bound([10, 30]) == pytest.approx(1 / 20)
    assert magnitude.bound([30]) == pytest.approx(1 / 30)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("MX", 1.0), "magnitude is"), (("MG", 0.0), "max_grad_norm")],
)
def test_refuses_other_magnitudes(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Magnitude(*arguments)
