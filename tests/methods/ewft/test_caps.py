"""PrivUnit: its law by its densities, its mean and its error by draws, and how far ahead of Gaussian noise it is."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import special

from fastdp import accounting
from fastdp.methods.ewft.caps import best_cap, draw_direction
from fastdp.ops import NoiseStream
from tests.ops.test_dchi import FALSE_ALARM, chi_square


@given(dimension=st.integers(2, 5000), epsilon=st.floats(0.05, 40))
@settings(max_examples=60, deadline=None)
def test_densities_differ_by_exp_epsilon_at_most(dimension, epsilon):
    cap = best_cap(dimension, epsilon)
    half = (dimension - 1) / 2
    share = float(special.betainc(half, half, (1 - cap.gamma) / 2))
    assert share == pytest.approx(cap.share, rel=1e-12)
    inside, outside = cap.probability / share, (1 - cap.probability) / (1 - share)
    assert math.log(inside) - math.log(outside) <= epsilon
    assert cap.epsilon == pytest.approx(epsilon, rel=1e-6)
    assert 0 < cap.mean <= 1


@pytest.mark.parametrize(("dimension", "epsilon"), [(2, 1.0), (8, 4.0), (64, 8.0)])
def test_draws_lie_in_the_cap_as_often_as_they_should_and_evenly(dimension, epsilon):
    """The inner product's law in eight parts, four of the cap and four of the rest, of equal probability each."""
    cap = best_cap(dimension, epsilon)
    vector = torch.randn(1, dimension, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = draw_direction(vector.expand(20_000, -1), epsilon, NoiseStream.unsafe_reproducible(2))
    assert torch.allclose(drawn.norm(dim=1), torch.tensor(1 / cap.mean, dtype=torch.float64))
    along = (drawn * cap.mean) @ (vector[0] / vector.norm())
    half = (dimension - 1) / 2
    shares = [cap.share * k / 4 for k in range(5)] + [cap.share + (1 - cap.share) * k / 4 for k in range(1, 5)]
    edges = torch.tensor([1 - 2 * float(special.betaincinv(half, half, share)) for share in shares[1:-1]])
    part = (along[:, None] < edges.double()).sum(1)
    p = cap.probability
    law = torch.tensor([p / 4] * 4 + [(1 - p) / 4] * 4, dtype=torch.float64)
    assert chi_square(part, law.numpy()) > FALSE_ALARM
    # What lies across has no direction of its own: its mean over 20,000 draws is within six of its standard errors.
    across = drawn - (drawn @ (vector[0] / vector.norm()))[:, None] * (vector / vector.norm())
    error = across.square().sum(1).mean().sqrt() / math.sqrt(len(drawn))
    assert float(across.mean(0).norm()) < 6 * float(error)


@pytest.mark.parametrize(("dimension", "epsilon"), [(4, 2.0), (256, 8.0)])
def test_estimates_have_the_vector_for_their_mean_and_the_error_that_is_stated(dimension, epsilon):
    cap, count = best_cap(dimension, epsilon), 30_000
    vector = torch.nn.functional.normalize(
        torch.randn(1, dimension, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    )
    drawn = draw_direction(5 * vector.expand(count, -1), epsilon, NoiseStream.unsafe_reproducible(4))
    # The mean of `count` draws has 1 / `count` of one draw's squared error, which is six times its root once in more than 10^9.
    assert float((drawn.mean(0) - vector[0]).norm()) < 6 * math.sqrt(cap.variance / count)
    # |draw - vector|^2 = |draw|^2 - 2 <draw, vector> + 1, of which the middle one varies, with the inner product's deviation.
    errors = (drawn - vector).square().sum(1)
    assert float((errors.mean() - cap.variance).abs()) < 6 * float(errors.std()) / math.sqrt(count)


def test_it_errs_far_less_than_gaussian_noise_of_the_same_epsilon():
    """d = 1,024, epsilon 8: ten times less than the Gaussian mechanism at (8, 1e-5), which also needs that delta."""
    (multiplier,) = accounting.sound_schedule(1, 8.0, 1e-5)
    gaussian = 1024 * (2 * multiplier) ** 2
    assert gaussian == pytest.approx(1476, rel=0.01)
    assert best_cap(1024, 8.0).variance == pytest.approx(136, rel=0.03)


def test_a_vector_without_direction_and_refusals():
    stream = NoiseStream()
    assert torch.isfinite(draw_direction(torch.zeros(3, 4), 1.0, stream)).all()
    assert draw_direction(torch.full((2, 4), 1e-300, dtype=torch.float64), 1.0, stream).shape == (2, 4)
    assert draw_direction(torch.empty(0, 4), 1.0, stream).shape == (0, 4)
    for vectors, epsilon in (
        (torch.ones(1, 1), 1.0),
        (torch.ones(1, 3), 0.0),
        (torch.ones(1, 3), math.inf),
        (torch.full((1, 3), math.nan), 1.0),
    ):
        with pytest.raises(ValueError):
            draw_direction(vectors, epsilon, stream)
