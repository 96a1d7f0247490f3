"""Axes of parameters of which nothing is known, and what a step promises along axes."""

import pytest
import torch

from fastdp.methods.rapft.axes import Moments, promised, rank_one


@pytest.mark.parametrize("power", [0.25, 1.0])
def test_a_parameter_without_sizes_is_taken_for_one_of_middling_size(power):
    """Its axis is that of the mean of the others, however small these are."""
    for size in (1e-3, 4.0):
        sizes = {"a": torch.full((3, 4), size), "b": torch.zeros(2, 5), "c": torch.full((6,), 3 * size)}
        axes = {name: own.whole(sizes[name].shape) for name, own in rank_one(sizes, power).items()}
        ratio = float(axes["b"].mean() / axes["a"].mean())
        assert ratio == pytest.approx(2**power, rel=1e-5)
        assert float(axes["c"].mean() / axes["a"].mean()) == pytest.approx(3**power, rel=1e-5)


def test_a_promise_counts_the_noise_along_the_axes():
    """Two coordinates with signals of 1 and 4, noise in proportion to (1, 2): written out."""
    mean = torch.tensor([1.0, 4.0])
    found, ratio = {"a": Moments(mean, mean.square())}, 0.5
    axes = rank_one({"a": torch.tensor([1.0, 2.0])}, 1.0)
    scales = torch.tensor([1.0, 2.0]) / 2.5**0.5
    assert torch.allclose(axes["a"].whole(mean.shape).float(), scales)
    x = ratio * mean / (scales * (mean / scales).norm())
    assert promised(found, ratio, axes) == pytest.approx(float((mean * x / (1 + x**2).sqrt()).sum()), rel=1e-5)
