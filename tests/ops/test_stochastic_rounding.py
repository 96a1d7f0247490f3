"""Moments in bfloat16: on average nothing is lost, and nothing stands still."""

import pytest
import torch

from fastdp import ops
from fastdp.ops.stochastic_rounding import float32_moments, random_bits, round_to_bfloat16
from tests.cases import cases


def test_both_neighbours_come_as_often_as_the_distance_says():
    """Over all sixteen bits: exactly."""
    x = torch.tensor([1.0, -3.3, 1e-30, 7.7e37]).repeat_interleave(1 << 16)
    kept = round_to_bfloat16(x, torch.arange(1 << 16).repeat(4)).double().view(4, -1)
    for own, row in zip(x.double().view(4, -1)[:, 0], kept):
        assert row.unique().numel() == (1 if own == 1.0 else 2)
        torch.testing.assert_close(row.mean(), own, rtol=1e-15, atol=0)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    worst = torch.tensor([2**31 - 1, -1], dtype=torch.int32).view(torch.float32)
    for x in (odd, worst):
        torch.testing.assert_close(round_to_bfloat16(x, torch.full(x.shape, 0xFFFF)).float(), x, equal_nan=True)


@cases("shift", [0, 16])
def test_bits_are_spread_over_elements_and_over_steps(shift):
    """Sixteen bins over 4,096 elements of a step, and over 4,096 steps of an element: no bin six deviations off."""
    along = random_bits(4096, 3, 9, torch.device("cpu"))[None]
    over = torch.stack([random_bits(4, 3, step, torch.device("cpu")) for step in range(4096)]).T
    for bits in (*along, *over):
        counts = torch.bincount((bits >> (shift + 12)) & 15, minlength=16)
        assert int((counts - 256).abs().max()) <= 6 * 16


def test_a_second_moment_follows_what_shrinks():
    """To nearest it would stay at 1; at random it is within a few roundings of float32's."""
    square, mean = torch.ones(4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    assert torch.equal((square.float() * 0.999).bfloat16(), square)
    for step in range(300):
        with float32_moments(mean, square, (1, step)) as (_, wide):
            wide *= 0.999
    assert abs(float(square.float().mean()) / 0.999**300 - 1) < 0.002


def test_a_step_with_moments_in_half_precision():
    """Takes the parameter where float32 moments of the same values take it, and keeps what becomes of these."""
    total, moments = torch.rand(300), [torch.rand(300).bfloat16() for _ in range(2)]
    wide = [moment.float() for moment in moments]
    params = [torch.ones(300) for _ in range(2)]
    options = {"divisor": 4.0, "lr": 0.1, "step": 3}
    drawn = ops.NoiseStream.unsafe_reproducible(1).take_at(5, [2])
    for param, (mean, square) in zip(params, (moments, wide)):
        ops.adamw_noise_steps_([param], [total], [mean], [square], 0.3, drawn, **options)
    assert torch.equal(*params)
    kept = torch.empty_like(moments[0]), torch.empty_like(moments[1])
    with float32_moments(*kept, (2, 5)) as into:
        for moment, own in zip(into, wide):
            moment.copy_(own)
    assert all(torch.equal(moment, own) for moment, own in zip(moments, kept))
    with pytest.raises(ValueError, match="all float32 or all bfloat16"):
        ops.adamw_noise_steps_([params[0]], [total], [moments[0]], [wide[1]], 0.3, drawn, **options)
