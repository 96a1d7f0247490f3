"""Ops over many tensors: each is the op over one, tensor by tensor."""

from contextlib import nullcontext

import pytest
import torch

from fastdp import ops
from fastdp.ops.factors import HAS_KERNELS
from fastdp.ops.table import definitions
from tests.cases import cases, pairs
from tests.ops.uses import by_threads, stream

SHAPES = [(3,), (130, 7), (1,), (0,), (2049,), (17, 300)]


@cases(*pairs(("masters", [False, True]), ("secure", [False, True]), ("dtype", [torch.float32, torch.bfloat16])))
def test_steps(dtype, secure, masters):
    params = [torch.randn(shape).to(dtype) for shape in SHAPES]
    wide = [p.to(torch.float32, copy=True) for p in params]
    sums, means, squares = ([torch.rand(shape) for shape in SHAPES] for _ in range(3))
    numbers = {"divisor": 8.0, "lr": 0.1, "step": 3, "secure_rounding": secure}
    alone = [[x.clone() for x in tensors] for tensors in (wide if masters else params, sums, means, squares)]
    for i, own in enumerate(zip(*alone)):
        ops.adamw_noise_step_(*own, 0.5, stream(4).at(2, 10 + i), **numbers)
    drawn = stream(4).take_at(2, range(10, 10 + len(SHAPES)))
    copies = wide if masters else []
    ops.adamw_noise_steps_(params, sums, means, squares, 0.5, drawn, masters=copies, **numbers)
    for got, expected in zip((wide if masters else params, sums, means, squares), alone):
        assert all(torch.equal(a, b) for a, b in zip(got, expected))
    assert all(torch.equal(p, w.to(dtype)) for p, w in zip(params, wide)) or not masters


@cases(*pairs(("moments", [torch.float32, torch.bfloat16]), ("secure", [False, True]), ("defined", [False, True])))
def test_steps_on_pieces_are_the_step_on_the_whole(defined, secure, moments):
    """To the last bit: noise, and the random rounding of moments, are those of the elements in the whole; so are axes."""
    whole = [torch.randn(9, 48), torch.rand(9, 48), *(torch.rand(9, 48).to(moments) for _ in range(2))]
    rows, columns = torch.rand(9) + 0.5, torch.rand(48) + 0.5
    cuts = [slice(0, 4), slice(4, 8), slice(8, 9), slice(9, 9)]
    pieces = [[x[cut].clone() for cut in cuts] for x in whole]
    numbers = {"divisor": 8.0, "lr": 0.1, "step": 3, "secure_rounding": secure}
    with definitions() if defined else nullcontext():
        drawn = stream(4).take_at(2, [7])
        ops.adamw_noise_steps_(*[[x] for x in whole], 0.5, drawn, rows=[rows], columns=[columns], **numbers)
        for at, cut in enumerate(cuts):
            own = [[own[at]] for own in pieces]
            axes = {"rows": [rows[cut].clone()], "columns": [columns]}
            ops.adamw_noise_steps_(*own, 0.5, drawn, firsts=[48 * cut.start], **axes, **numbers)
    for got, expected in zip(pieces, whole):
        assert torch.equal(torch.cat(got), expected)


def test_pieces_begin_at_blocks_of_noise():
    own = [[torch.ones(4)] for _ in range(4)]
    for firsts in ([8], [-16], [0, 16]):
        with pytest.raises(ValueError, match="firsts must be multiples of 16"):
            ops.adamw_noise_steps_(*own, 0.5, stream(4).take_at(0, [0]), divisor=1.0, lr=0.1, step=1, firsts=firsts)


def test_positions_are_those_of_single_draws_and_claimed_with_them():
    one, other = stream(4), stream(4)
    assert torch.equal(one.take_at(5, [3, 9]), torch.stack([other.at(5, 3).take(), other.at(5, 9).take()]))
    with pytest.raises(RuntimeError, match="tensor 9 was already drawn"):
        one.take_at(5, [4, 9])
    assert one.take_at(5, [4]).shape == (1, 12)
    with pytest.raises(RuntimeError, match="already drawn"):
        one.at(5, 3).take()
    with pytest.raises(RuntimeError, match="may not go back"):
        one.take_at(4, [1])
    with pytest.raises(ValueError, match="twice"):
        one.take_at(6, [1, 1])


def test_refusals():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="empty"):
        ops.instance_sqnorm_group([])
    two, ends = [x, x], torch.tensor([0, 1, 2])
    for wrong, message in (
        (([], [], torch.ones(0, 2)), "at least one"),
        ((two, [x], torch.ones(2, 2)), "as many of each"),
        (([ends[:2]], [x], torch.ones(1, 2)), "vector of ids"),
        ((two, two, torch.ones(2, 3)), "weights"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.weighted_sum_group(*wrong, ends)
    for args, message in (
        (([], [], ends, torch.ones(0, 2).bool()), "at least one"),
        (([ends[:2]], [x], ends, torch.ones(1, 2).bool()), "vector of ids"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.chosen_sqnorm(*args)
    pair, *others = [[torch.ones(3)] * 2, *([torch.ones(3)] for _ in range(3))]
    with pytest.raises(ValueError, match="as many"):
        ops.adamw_noise_steps_(pair, *others, 1.0, stream(4).take_at(0, [0]), divisor=1.0, lr=0.1, step=1)


@cases("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_direct_norms_are_those_of_each(dtype):
    offsets, sizes = torch.tensor([0, 70, 70, 90, 91, 120]), [(7, 40), (40, 7), (1, 1), (33, 64)]
    lefts, rights = ([torch.randn(120, size[side]).to(dtype) for size in sizes] for side in (0, 1))
    rights[3] = rights[3].t().contiguous().t()
    lefts[0][100:] = 0
    squares, products, counts = ops.direct_norms(lefts, rights, offsets, [2])
    for at, (left, right) in enumerate(zip(lefts, rights)):
        square = ops.sqnorm(left, right, offsets, "direct")
        assert torch.equal(squares[at], torch.zeros_like(square) if at == 2 else square)
        assert torch.equal(products[at], ops.row_products(left, right, offsets)[0])
        assert torch.equal(counts[at], ops.token_counts([left], [right], offsets)[0])
    with definitions():
        for got, defined in zip((squares, products, counts), ops.direct_norms(lefts, rights, offsets, [2])):
            torch.testing.assert_close(got, defined, rtol=2e-3, atol=0)


@pytest.mark.skipif(not HAS_KERNELS, reason="without kernels torch multiplies, and its sums depend on the threads")
def test_sums_of_narrow_matrices_are_the_same_by_any_threads_and_leave_out_units_of_weight_0():
    ends, weights = torch.tensor([0, 0, 13, 300, 700]), torch.rand(2, 4)
    weights[:, 1] = 0
    lefts, rights = [torch.randn(700, 4), torch.randn(700, 129)], [torch.randn(700, 300), torch.randn(700, 33)]
    lefts[0][:13] = float("nan")

    def compute():
        return torch.cat([total.flatten() for total in ops.weighted_sum_group(lefts, rights, weights, ends)])

    found = by_threads(compute)
    each = zip(lefts, rights, weights.double().repeat_interleave(ends.diff(), dim=1))
    exact = [(left[13:].double() * own[13:, None]).T @ right[13:].double() for left, right, own in each]
    torch.testing.assert_close(found, torch.cat([own.flatten() for own in exact]).float(), rtol=1e-5, atol=1e-4)
