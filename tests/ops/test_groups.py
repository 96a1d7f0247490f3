"""Ops over many tensors: each is the op over one, tensor by tensor."""

import pytest
import torch

from fastdp import ops
from fastdp.ops.table import OPS

SHAPES = [(3,), (130, 7), (1,), (0,), (2049,), (17, 300)]


def stream():
    return ops.NoiseStream.unsafe_reproducible(4)


def instances(units=3, dtype=torch.float32):
    return [torch.randn(units, *shape).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_and_sums(dtype):
    made, weights = instances(dtype=dtype), torch.rand(len(SHAPES), 3)
    made[1][2] = float("nan")
    weights[1, 2] = 0.0
    torch.testing.assert_close(
        ops.instance_sqnorm_group(made), torch.stack([ops.instance_sqnorm(x) for x in made]), equal_nan=True
    )
    for got, x, row in zip(ops.instance_sum_group(made, weights), made, weights):
        assert torch.equal(got, ops.instance_sum(x, row))


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps(dtype, secure, masters):
    params = [torch.randn(shape).to(dtype) for shape in SHAPES]
    wide = [p.float() for p in params]
    sums, means, squares = ([torch.rand(shape) for shape in SHAPES] for _ in range(3))
    numbers = {"divisor": 8.0, "lr": 0.1, "step": 3, "secure_rounding": secure}
    alone = [[x.clone() for x in tensors] for tensors in (wide if masters else params, sums, means, squares)]
    for i, own in enumerate(zip(*alone)):
        ops.adamw_noise_step_(*own, 0.5, stream().at(2, 10 + i), **numbers)
    drawn = stream().take_at(2, range(10, 10 + len(SHAPES)))
    copies = wide if masters else []
    ops.adamw_noise_steps_(params, sums, means, squares, 0.5, drawn, masters=copies, **numbers)
    for got, expected in zip((wide if masters else params, sums, means, squares), alone):
        assert all(torch.equal(a, b) for a, b in zip(got, expected))
    assert all(torch.equal(p, w.to(dtype)) for p, w in zip(params, wide)) or not masters


def test_positions_are_those_of_single_draws_and_claimed_with_them():
    one, other = stream(), stream()
    assert torch.equal(one.take_at(5, [3, 9]), torch.stack([other.at(5, 3).take(), other.at(5, 9).take()]))
    with pytest.raises(RuntimeError, match="tensor 9 was already drawn"):
        one.take_at(5, [4, 9])
    assert one.take_at(5, [4]).shape == (1, 11)
    with pytest.raises(RuntimeError, match="already drawn"):
        one.at(5, 3).take()
    with pytest.raises(RuntimeError, match="may not go back"):
        one.take_at(4, [1])
    with pytest.raises(ValueError, match="twice"):
        one.take_at(6, [1, 1])


def test_refusals():
    x = torch.ones(2, 3)
    for bad, message in (([], "empty"), ([x, torch.ones(3, 3)], "same units")):
        with pytest.raises(ValueError, match=message):
            ops.instance_sqnorm_group(bad)
    with pytest.raises(ValueError, match="weights are"):
        ops.instance_sum_group([x], torch.ones(2, 2))
    drawn, numbers = stream().take_at(0, [0]), {"divisor": 1.0, "lr": 0.1, "step": 1}
    tensors = [[torch.ones(3)] for _ in range(4)]
    for changed, message in (
        ({0: [torch.ones(3)] * 2}, "as many"),
        ({1: [torch.ones(4)]}, "shape"),
        ({2: [torch.ones(3).bfloat16()]}, "float32"),
    ):
        wrong = [changed.get(i, own) for i, own in enumerate(tensors)]
        with pytest.raises((ValueError, TypeError), match=message):
            ops.adamw_noise_steps_(*wrong, 1.0, drawn, **numbers)
    with pytest.raises(ValueError, match="positions are"):
        ops.adamw_noise_steps_(*tensors, 1.0, drawn[0], **numbers)


def test_opcheck():
    made = instances()[:2]
    for name, args in (
        ("instance_norms_group", (made,)),
        ("instance_sum_group", (made, torch.ones(2, 3))),
        (
            "adamw_noise_steps_",
            ([torch.ones(3)], [torch.ones(3)], [torch.ones(3)], [torch.ones(3)], [], stream().take_at(0, [1]))
            + (1.0, 1.0, 0.1, 0.9, 0.999, 1e-8, 0.0, 1, None, False, [], []),
        ),
    ):
        torch.library.opcheck(getattr(torch.ops.fastdp, name).default, args)
        assert name in OPS
