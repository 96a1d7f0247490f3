"""What axes can gain for Adam: no choice passes the best, which is known in closed form where noise dominates."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

pytest.importorskip("matplotlib")

from fastdp.bench.utility.shaping import less_noise

from fastdp.methods.rapft import Moments


def some(seed: int, spread: float) -> tuple[dict[str, Moments], dict[str, torch.Tensor]]:
    """Gradients that agree more in some coordinates than in others, and axes."""
    generator = torch.Generator().manual_seed(seed)
    found, axes = {}, {}
    for name, shape in (("a", (3, 5)), ("b", (7,))):
        squares = (spread * torch.randn(shape, generator=generator)).exp().double()
        common = squares * torch.rand(shape, generator=generator).clamp_min(1e-3)
        found[name] = Moments(common.sqrt(), squares)
        axes[name] = (spread * torch.randn(shape, generator=generator)).exp()
    return found, axes


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 2**32 - 1), st.floats(0, 3), st.floats(-2, 2))
def test_no_axes_pass_the_best(seed: int, spread: float, power: float) -> None:
    found, axes = some(seed, spread)
    best = less_noise(found, 10**power)
    assert best >= 1 - 1e-5
    assert less_noise(found, 10**power, axes) <= best * (1 + 1e-5)
    assert less_noise(found, 10**power, {name: torch.tensor(3.0) for name in found}) == pytest.approx(1)


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 2**32 - 1), st.floats(0, 2))
def test_where_noise_dominates_the_best_follows_what_examples_have_in_common(seed: int, spread: float) -> None:
    found, _ = some(seed, spread)
    best = less_noise(found, 1e-4)
    agreed = {name: own.square / own.mean.square() for name, own in found.items()}
    assert less_noise(found, 1e-4, agreed) == pytest.approx(best, rel=1e-4)
    mean, squares = (torch.cat([own[i].reshape(-1) for own in found.values()]) for i in (0, 1))
    most = ((mean**4 / squares).sum() * squares.sum()).sqrt() / mean.square().sum()
    assert best == pytest.approx(float(most), rel=1e-4)


def test_where_all_coordinates_agree_alike_axes_only_lose() -> None:
    squares = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)
    found = {"a": Moments((squares / 10).sqrt(), squares)}
    assert less_noise(found, 1e-4) == pytest.approx(1, rel=1e-4)
    assert less_noise(found, 1e-4, {"a": squares.sqrt()}) == pytest.approx(6 / 42**0.5, rel=1e-4)
