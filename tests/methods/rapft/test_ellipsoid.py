"""The multiplier of a clip to an ellipsoid, where its noise does not follow its axes."""

import math

import pytest
import torch

from fastdp.methods.rapft.allocation import EllipsoidPolicy


@pytest.mark.parametrize(
    ("axes", "stds"), [((1.0, 2.0), (3.0, 2.0)), ((1.0, 2.0), (1.0, 6.0)), ((0.5, 0.5), (2.0, 2.0))]
)
def test_the_multiplier_is_one_over_the_farthest_that_a_unit_moves_the_sum(axes, stds):
    """In units of the noise, over all directions of a vector on the ellipsoid."""
    angles = torch.linspace(0, math.pi / 2, 10_001, dtype=torch.float64)
    moved = torch.stack([axes[0] * angles.cos() / stds[0], axes[1] * angles.sin() / stds[1]]).norm(dim=0)
    policy = EllipsoidPolicy(axes, stds, {})
    assert policy.noise_multiplier == pytest.approx(1 / float(moved.max()), rel=1e-6)
