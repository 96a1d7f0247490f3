"""Axes of parameters of which nothing is known."""

import pytest
import torch

from fastdp.methods.rapft.axes import rank_one


@pytest.mark.parametrize("power", [0.25, 1.0])
def test_a_parameter_without_sizes_is_taken_for_one_of_middling_size(power):
    """Its axis is that of the mean of the others, however small these are."""
    for size in (1e-3, 4.0):
        sizes = {"a": torch.full((3, 4), size), "b": torch.zeros(2, 5), "c": torch.full((6,), 3 * size)}
        axes = {name: own.whole(sizes[name].shape) for name, own in rank_one(sizes, power).items()}
        ratio = float(axes["b"].mean() / axes["a"].mean())
        assert ratio == pytest.approx(2**power, rel=1e-5)
        assert float(axes["c"].mean() / axes["a"].mean()) == pytest.approx(3**power, rel=1e-5)
