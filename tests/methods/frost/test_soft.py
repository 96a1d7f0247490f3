"""Soft freezing: scales from released magnitudes, and steps that are those of single examples in these scales."""

import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import fastdp
from fastdp import accounting
from fastdp.methods.frost import DPFrost
from fastdp.methods.frost.partitions import Partition
from fastdp.methods.frost.selection import Selected
from fastdp.methods.frost.soft import even_axes, known_magnitudes, soft_scales
from tests.cases import cases
from tests.engine import models
from tests.engine.models import batch as model_batch
from tests.engine.runs import clipped_sum, collate, error, examples, join, logical_step, one_by_one
from tests.methods.frost.test_method import Deep, _Batches

QUIET = {"selection_steps": 2, "selection_rate": 0.5, "selection_noise_multiplier": 0.0}
PARTS = (Partition("a", ("a.weight", "a.bias"), 6), Partition("b", ("b",), 2), Partition("c", ("c",), 4))


def test_scales_follow_the_power_and_leave_even_noise_as_it_was() -> None:
    scales = soft_scales(PARTS, [4.0, 1.0, 0.0], 0.5)
    assert scales["a.weight"] == scales["a.bias"] == pytest.approx(2 * scales["b"])
    # Nothing known of c: it counts as the least that is known.
    assert scales["c"] == scales["b"]
    sizes = {name: part.size for part in PARTS for name in part.parameters[:1]}
    assert sum(sizes[name] * scales[name] ** 2 for name in sizes) == pytest.approx(sum(sizes.values()))
    assert set(soft_scales(PARTS, [0.0] * 3, 1.0).values()) == {1.0}


def test_half_is_the_power_of_least_noise_for_a_given_norm() -> None:
    """Sum n s^2, what noise adds, times sum n m^2 / s^2, what is clipped, is least at s^2 = m."""
    sizes, magnitudes = np.array([p.size for p in PARTS], dtype=float), np.array([3.0, 0.2, 1.0])

    def cost(power: float) -> float:
        scales = soft_scales(PARTS, magnitudes.tolist(), power)
        s = np.array([scales[part.parameters[0]] for part in PARTS])
        return float((sizes * s**2).sum() * (sizes * magnitudes**2 / s**2).sum())

    assert min(np.linspace(0, 1, 21), key=cost) == pytest.approx(0.5)


def test_magnitudes_below_their_noise_count_as_their_noise() -> None:
    observed = np.array([[0.5, 0.01, -0.4], [np.nan, 0.02, 0.3]])
    selected = Selected(np.array([1, 2, 2]), observed, (0.1, 0.1))
    known = known_magnitudes(selected, noise_multiplier=2.0, selection_rate=0.5, estimation_iterations=50)
    # One observation at q = .5, sensitivity .1 and multiplier 2 has a deviation of .4; with two it is less.
    assert known[0] == pytest.approx(1.0)
    assert 0 < known[1] == known[2] < 0.4
    quiet = known_magnitudes(selected, 0.0, 0.5, 50)
    assert quiet[0] == known[0]
    assert (quiet >= 0).all()


@pytest.mark.parametrize("ratio", [1.0, 0.6])
def test_a_step_is_that_of_single_examples_in_scaled_coordinates(ratio: float) -> None:
    model = Deep()
    method = DPFrost(**QUIET, unfreezing_ratio=ratio, axes_power=0.5, max_grad_norm=0.2)  # type: ignore[arg-type]
    loader = DataLoader(examples(24), batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
    private = fastdp.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        loader,
        method=method,
        noise_multiplier=0.0,
        epochs=2,
        unsafe_seed=3,
    )
    gradients, batches = logical_step(private)
    chosen = method.chosen(dict(model.named_parameters()), private.outcome)
    assert (len(chosen) == 4) == (ratio == 1.0)
    scales = {name: float(private.outcome["scale." + name]) for name in gradients}
    # The last layer's gradients are by far the largest, and all entries of a partition have one scale.
    assert max(scales, key=lambda name: scales[name]).startswith("layers.3")
    assert scales["layers.3.weight"] == scales["layers.3.bias"]
    singles = one_by_one(model, join(batches))
    total = clipped_sum([{n: g[n] / scales[n] for n in scales} for g in singles], 0.2)
    assert error(gradients, {n: total[n] * scales[n] / 8 for n in scales}) < 2e-5
    unscaled = clipped_sum([{n: g[n] for n in scales} for g in singles], 0.2)
    assert error(gradients, {n: unscaled[n] / 8 for n in scales}) > 0.01


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_noise_has_the_scale_of_its_partition(name: str) -> None:
    """Of a step without gradients worth speaking of: by tensor, standard deviations of at least 200 normals over what they
    should be lie in 1 +- .35 but for 2e-12 of runs each.
    """
    model = models.build(name)
    data = DataLoader(_Batches(model_batch(name, rows=8)), batch_size=4)
    method = DPFrost(**QUIET, unfreezing_ratio=1.0, axes_power=0.5, max_grad_norm=1e-6)  # type: ignore[arg-type]
    private = fastdp.make_private(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0),
        data,
        method=method,
        noise_multiplier=100.0,
        target_delta=1e-3,
        epochs=2,
        unsafe_seed=3,
    )
    for batch in private.data_loader:
        model(**batch).loss.backward()
        private.optimizer.step()
        if private.last_step_done:
            break
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    large = {n: g for n, g in found.items() if g.numel() >= 200}
    assert len(large) > 5
    assert len({float(private.outcome["scale." + n]) for n in large}) > 3
    for n, gradient in large.items():
        assert float(gradient.std() * 4 / 1e-4 / private.outcome["scale." + n]) == pytest.approx(1, abs=0.35)
    private.detach()


def test_the_fused_step_is_the_unfused_one() -> None:
    """Noise drawn within AdamW, on the same positions: the same weights within roundings, and no gradient is left."""
    ends = []
    for fused in (True, False):
        model = Deep()
        loader = DataLoader(examples(24), batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
        private = fastdp.make_private(
            model,
            fastdp.optim.AdamW(model.parameters(), lr=1e-2, fused=fused),
            loader,
            method=DPFrost(**QUIET, unfreezing_ratio=1.0, axes_power=0.5),
            noise_multiplier=0.5,
            target_delta=1e-3,
            epochs=2,
            unsafe_seed=3,
        )
        gradients, _ = logical_step(private)
        assert bool(gradients) != fused
        logical_step(private)
        ends.append(dict(model.named_parameters()))
    before = dict(Deep().named_parameters())
    moved = {n: p.detach() - before[n].detach() for n, p in ends[0].items()}
    assert error({n: ends[1][n].detach() - before[n].detach() for n in moved}, moved) < 1e-4


def test_the_card_is_that_of_a_selection_and_its_steps() -> None:
    model = Deep()
    loader = DataLoader(examples(24), batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
    private = fastdp.make_private(
        model,
        fastdp.optim.AdamW(model.parameters(), lr=1e-2),
        loader,
        method=DPFrost(unfreezing_ratio=1.0, axes_power=0.5, selection_steps=2, selection_rate=0.2),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=2,
    )
    logical_step(private)
    card = private.card()
    assert card["mechanism"]["axes_power"] == 0.5
    assert card["mechanism"]["unfreezing_ratio"] == 1.0
    assert private.ledger.spent("selection") == 2
    assert accounting.epsilon(private.ledger.budget_event(), 1e-3) <= 3.0
    assert accounting.verify(card).guarantee


def test_even_axes_fit_parameters_of_any_shape() -> None:
    parameters = {"a": torch.zeros(()), "b": torch.zeros(3), "c": torch.zeros(2, 3, 4)}
    axes = even_axes({"a": 2.0, "b": 3.0, "c": 4.0}, parameters)
    for name, parameter in parameters.items():
        axes[name].check(name, parameter.shape)
        assert set(axes[name].whole(parameter.shape).flatten().tolist()) == {{"a": 2.0, "b": 3.0, "c": 4.0}[name]}


@cases(
    ("options", "message"),
    [
        ({"unfreezing_ratio": 1.0}, "set axes_power, or use DPSGD"),
        ({"axes_power": 0.0}, "axes_power is 0.0"),
        ({"axes_power": math.nan}, "axes_power is nan"),
        ({"axes_power": 0.5, "choose_by": "random"}, "follow released magnitudes"),
        ({"axes_power": 0.5, "granularity": "parameters", "selection_steps": 1}, "axes are of partitions"),
    ],
)
def test_refusals(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPFrost(**options)
