"""A step along axes whose second moment is freed of the noise at each coordinate, written out in float64."""

import pytest
import torch

from fastdp import ops
from fastdp.ops.table import OPS

STD, DIVISOR, LR, BETAS, DECAY, STEP, FLOOR = 3.0, 8.0, 0.1, (0.9, 0.99), 0.02, 4, 1e-4


@pytest.mark.parametrize("floor", [None, FLOOR])
@pytest.mark.parametrize("how", ["definition", "op"])
def test_a_step_along_axes(floor, how):
    torch.manual_seed(0)
    param, total = torch.randn(5, 7), 10 * torch.randn(5, 7)
    mean, square = torch.randn(5, 7), 0.5 + torch.rand(5, 7)
    rows, columns = torch.linspace(0.2, 2, 5), torch.linspace(0.5, 3, 7)
    position = ops.NoiseStream.unsafe_reproducible(0).take()
    noised = ops.add_noise_(total.clone(), STD, position, secure_rounding=False).double()
    axes = torch.outer(rows, columns).double()
    g = axes * noised / DIVISOR
    wanted_mean = BETAS[0] * mean.double() + (1 - BETAS[0]) * g
    wanted_square = BETAS[1] * square.double() + (1 - BETAS[1]) * g**2
    unbiased = wanted_square / (1 - BETAS[1] ** STEP)
    under = unbiased.sqrt() + 1e-8
    if floor is not None:
        under = (unbiased - (STD / DIVISOR * axes) ** 2).clamp(min=floor).sqrt()
    update = wanted_mean / (1 - BETAS[0] ** STEP) / under
    wanted = param.double() * (1 - LR * DECAY) - LR * update
    numbers = (STD, DIVISOR, LR, *BETAS, 1e-8, DECAY, STEP, floor, False, rows, columns)
    run = OPS["adamw_noise_step_"].reference if how == "definition" else OPS["adamw_noise_step_"]
    run(param, total, mean, square, position, *numbers)
    for found, expected in ((mean, wanted_mean), (square, wanted_square), (param, wanted)):
        torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=2e-5)
