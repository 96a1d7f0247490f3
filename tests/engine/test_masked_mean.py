"""The mean that a loop reads, of units that are real and finite."""

import torch

from fastdp.engine.loss.losses import masked_mean


def test_padding_and_what_is_not_finite_take_no_part():
    losses = torch.tensor([1.0, float("nan"), 3.0, 100.0, float("inf")])
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
    assert float(masked_mean(losses, weights)) == 2.0
    assert float(masked_mean(losses, torch.zeros(5))) == 0.0
