"""Bounds and noise of the two blocks: the figures of the printed guarantee, and the sensitivity of every policy."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.policy import Policy
from fastdp.methods import rapft
from tests.engine.reference import known

SHAPES = {"a.weight": (3, 4), "b.bias": (5,)}


@given(
    bounds=st.tuples(st.floats(0.05, 20), st.floats(0.05, 20)),
    sizes=st.tuples(st.floats(0.05, 0.95), st.floats(0.05, 0.95)),
    tilt=st.floats(0.3, 3),
)
def test_no_other_noise_of_the_same_multiplier_has_less_variance(bounds, sizes, tilt):
    best = rapft.optimal_stds(0.8, bounds, sizes)
    assert Policy(bounds, best, {}).noise_multiplier == pytest.approx(0.8)
    other = Policy(bounds, (best[0] * tilt, best[1]), {})
    other_stds = [s * 0.8 / other.noise_multiplier for s in other.stds]

    def cost(stds):
        return sum(n * s**2 for n, s in zip(sizes, stds))

    assert cost(best) <= cost(other_stds) * (1 + 1e-9)


def random_masks(seed, ratio):
    generator = torch.Generator().manual_seed(seed)
    masks = {name: torch.rand(shape, generator=generator) < ratio for name, shape in SHAPES.items()}
    masks["a.weight"][0, 0], masks["a.weight"][0, 1] = True, False
    return masks


def policy_of(kind, masks):
    return rapft.masked_policy(masks, allocation=kind, max_grad_norm=1.3, noise_multiplier=0.9)


@pytest.mark.parametrize("kind", ["printed", "optimal"])
@settings(max_examples=150)
@given(seed=st.integers(0, 10**6), ratio=st.floats(0.1, 0.95), log_scale=st.floats(-3, 6), strong=st.floats(1e-3, 1e3))
def test_one_unit_moves_the_release_by_no_more_than_stated(kind, seed, ratio, log_scale, strong):
    """The sum before noise, each group over its own std: its distance between neighbours is at most 1 / multiplier."""
    masks = random_masks(seed, ratio)
    policy = policy_of(kind, masks)
    assert policy.noise_multiplier == pytest.approx(0.9)
    generator = torch.Generator().manual_seed(seed + 1)
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    accumulator = Accumulator(parameters, policy)

    def unit():
        gradients = {
            name: 10**log_scale * torch.randn(1, *shape, generator=generator) for name, shape in SHAPES.items()
        }
        return {name: g * torch.where(masks[name], 1.0, strong) for name, g in gradients.items()}

    accumulator.add_unit(unit(), torch.ones(1))
    before = {name: total.clone() for name, total in accumulator.sums.items()}
    accumulator.add_unit(unit(), torch.ones(1))
    squared = 0.0
    for name, total in accumulator.sums.items():
        std = torch.where(masks[name], policy.stds[0], policy.stds[1])
        squared += float(((total - before[name]).double() / std).square().sum())
    # Sums of two terms in float32, of size at most two bounds: 1e-5 is far above their rounding.
    assert math.sqrt(squared) <= (1 + 1e-5) / policy.noise_multiplier


@pytest.mark.parametrize("kind", ["printed", "optimal"])
def test_the_stated_sensitivity_is_reached(kind):
    """No policy pays for more than it uses: gradients that are large in both blocks move the sum by 1 / multiplier."""
    masks = random_masks(3, 0.7)
    policy = policy_of(kind, masks)
    scales = policy.scales(known(torch.tensor([[1e8], [1e8]])))
    moved = math.sqrt(sum((float(s) * 1e4 / std) ** 2 for s, std in zip(scales, policy.stds)))
    assert moved == pytest.approx(1 / policy.noise_multiplier, rel=1e-5)


def test_a_unit_that_is_not_finite_is_dropped_whole():
    policy = policy_of("optimal", random_masks(1, 0.7))
    scales = policy.scales(known(torch.tensor([[1.0, torch.nan, torch.inf], [1.0, 1.0, 1.0]])))
    assert scales[:, 1:].eq(0).all()
    assert scales[:, 0].gt(0).all()


def test_parameters_of_one_block_have_no_mask():
    masks = {
        "a": torch.ones(4, dtype=torch.bool),
        "b": torch.zeros(3, dtype=torch.bool),
        "c": torch.tensor([True, False]),
    }
    policy = rapft.masked_policy(masks, allocation="printed", max_grad_norm=1.0, noise_multiplier=1.0)
    assert policy.group_of == {"a": 0, "b": 1, "c": (0, 1)}
    assert list(policy.masks) == ["c"]


def test_an_empty_block_and_negative_noise_are_refused():
    for weak in (0.0, 1.0, -0.1, 1.2, math.nan):
        with pytest.raises(ValueError, match="both must be above 0"):
            rapft.effective_noise_multiplier(0.6, weak)
    with pytest.raises(ValueError, match="both must be above 0"):
        policy_of("printed", {"a": torch.ones(4, dtype=torch.bool)})
    with pytest.raises(ValueError, match="noise_multiplier"):
        rapft.effective_noise_multiplier(-1.0, 0.7)
