"""Squared norms, inner products and L1 norms of per-unit gradients against float64, one unit at a time."""

import subprocess
import sys

import pytest
import torch

from fastdp import ops
from fastdp.ops.factors import HAS_KERNELS, MASKED_SQUARE, SQUARE
from fastdp.ops.table import OPS
from tests.cases import cases, pairs
from tests.ops.uses import by_threads

from .uses import DTYPES, RAGGED, factor, gradients, offsets_of, relative_error

BOUND = 1e-5  # what docs/kernels.md promises: factors of 16 bits are widened exactly, so it holds for every dtype
ROUTES = ("auto", "gram", "direct")


def squared(left, right, offsets, rows=None):
    return gradients(left, right, offsets, rows).square().sum((1, 2))


def test_float64_factors_stay_float64():
    offsets = offsets_of(RAGGED)
    tokens = int(offsets[-1])
    left, right = factor(tokens, 11, 10).double(), factor(tokens, 13, 11).double()
    mask = torch.ones(11, 13, dtype=torch.bool)
    truth = gradients(left, right, offsets)
    for route in ROUTES:
        assert relative_error(ops.sqnorm(left, right, offsets, route), truth.square().sum((1, 2))) <= 1e-12
    assert relative_error(ops.abs_sum(left, right, offsets), truth.abs().sum((1, 2))) <= 1e-12
    assert relative_error(ops.masked_sqnorm(left, right, offsets, mask)[0], truth.square().sum((1, 2))) <= 1e-12
    assert relative_error(ops.gram_norms([left], [right], [1], offsets)[0][0], truth.square().sum((1, 2))) <= 1e-12
    chosen = ops.chosen_sqnorm([left], [right], offsets, torch.ones(1, len(RAGGED), dtype=torch.bool))
    assert relative_error(chosen[0], truth.square().sum((1, 2))) <= 1e-12
    ids, rows = torch.arange(tokens) % 3, torch.rand(3, 13) < 0.5
    table = gradients(ids, right, offsets, 3)
    assert relative_error(ops.abs_sum(ids, right, offsets), table.abs().sum((1, 2))) <= 1e-12
    parts = torch.stack([(table.square() * rows).sum((1, 2)), (table.square() * ~rows).sum((1, 2))])
    assert relative_error(ops.masked_sqnorm(ids, right, offsets, rows), parts) <= 1e-12
    inner = ops.cross_inner(left, right, left, right, offsets, offsets)
    assert relative_error(inner, truth.square().sum((1, 2))) <= 1e-12


def test_repeated_ids_add_up_before_they_are_squared():
    right = factor(1, 512, 12)
    assert float(ops.sqnorm(torch.tensor([3, 3]), torch.cat([right, -right]), offsets_of([2]))) == 0


def test_non_finite_units_do_not_reach_their_neighbours():
    offsets = offsets_of([5, 5, 5])
    left, right = factor(15, 70, 1), factor(15, 90, 2)
    left[7, 3] = float("nan")
    mask = torch.zeros(70, 90, dtype=torch.bool)
    ids = torch.arange(15)
    results = [ops.sqnorm(left, right, offsets, route) for route in ROUTES]
    results += [ops.abs_sum(left, right, offsets), ops.masked_sqnorm(left, right, offsets, mask)[1]]
    results.append(ops.cross_inner(left, right, left, right, offsets, offsets))
    right[7, 3] = float("inf")
    table = torch.zeros(15, 90, dtype=torch.bool)
    results += [ops.sqnorm(ids, right, offsets), ops.abs_sum(ids, right, offsets)]
    results.append(ops.masked_sqnorm(ids, right, offsets, table)[1])
    for result in results:
        assert torch.isfinite(result).tolist() == [True, False, True]


def test_nan_in_one_part_of_a_mask_leaves_the_other():
    left, right = torch.ones(3, 70), torch.ones(3, 130)
    left[1, 69] = float("nan")
    mask = torch.zeros(70, 130, dtype=torch.bool)
    mask[69] = True
    masked, unmasked = ops.masked_sqnorm(left, right, offsets_of([3]), mask)
    assert masked.isnan()
    assert float(unmasked) == 69 * 130 * 9
    right[1, 129] = float("nan")
    mask = torch.zeros(2, 130, dtype=torch.bool)
    mask[1] = True
    masked, unmasked = ops.masked_sqnorm(torch.tensor([0, 1, 1]), right, offsets_of([3]), mask)
    assert masked.isnan()
    assert float(unmasked) == 130


def test_a_changed_mask_is_packed_again():
    left, right, offsets = factor(4, 5, 1), factor(4, 6, 2), offsets_of([4])
    mask = torch.zeros(5, 6, dtype=torch.bool)
    assert float(ops.masked_sqnorm(left, right, offsets, mask)[0]) == 0
    mask[2, 3] = True
    truth = gradients(left, right, offsets).square()[:, 2, 3]
    assert relative_error(ops.masked_sqnorm(left, right, offsets, mask)[0], truth) <= BOUND
    mask.numpy()[:] = True  # which no version counts
    assert float(ops.masked_sqnorm(left, right, offsets, mask)[1]) == 0
    mask.data.zero_()
    assert float(ops.masked_sqnorm(left, right, offsets, mask)[0]) == 0
    with torch.inference_mode():
        everything = torch.ones(5, 6, dtype=torch.bool)
    assert float(ops.masked_sqnorm(left, right, offsets, everything)[1]) == 0
    # The same mask over instances has its own layout of bits.
    assert float(ops.instance_masked_sqnorm(torch.ones(1, 5, 6), mask)[0]) == 0
    mask[2, 3] = True
    assert float(ops.instance_masked_sqnorm(torch.ones(1, 5, 6), mask)[0]) == 1


def test_a_forked_child_needs_no_threads():
    """OpenMP's threads are missing there: a kernel, or a product of torch, that waits for them never ends."""
    script = """
import os, signal, torch
from fastdp import ops
torch.set_num_threads(2)
left, right, ids = torch.randn(2048, 300), torch.randn(2048, 130), torch.randint(300, (2048,))
offsets, mask, weights = torch.tensor([0, 1000, 2048]), torch.rand(300, 130) < 0.5, torch.rand(2)
out, x, rows = torch.zeros(300, 130), torch.randn(2, 300_000), torch.rand(2048)
chosen, doubles = x[0] > 0, (left.double(), right.double())
calls = [
    lambda: ops.sqnorm(left, right, offsets, "direct"), lambda: ops.sqnorm(left, right, offsets, "gram"),
    lambda: ops.masked_sqnorm(left, right, offsets, mask), lambda: ops.abs_sum(ids, right, offsets),
    lambda: ops.cross_inner(left, right, ids, right, offsets, offsets), lambda: ops.row_products(left, right, offsets),
    lambda: ops.weighted_sum(ids, right, weights, out, offsets=offsets), lambda: ops.instance_abs_sum(x),
    lambda: ops.masked_weighted_sum(left, right, weights, weights, mask, out, offsets),
    lambda: ops.masked_weighted_sum(ids, right, weights, weights, mask, out, offsets),
    lambda: ops.affine_sums(right, right, rows, rows, offsets), lambda: ops.instance_masked_sqnorm(x, chosen),
    lambda: ops.weighted_sum(left, right, weights, out, offsets=offsets), lambda: ops.instance_sum(x, weights),
    lambda: ops.per_unit(left, right, offsets), lambda: ops.sqnorm(*doubles, offsets, "gram"),
]
left.T @ left  # starts the threads
for number, call in enumerate(calls):
    call()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        call()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, number
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_autocast_and_autograd_do_not_touch_the_result():
    offsets = offsets_of(RAGGED)
    left, right = factor(int(offsets[-1]), 33, 1).requires_grad_(), factor(int(offsets[-1]), 65, 2)
    plain = ops.sqnorm(left.double(), right.double(), offsets, "gram")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ops.sqnorm(left.double(), right.double(), offsets, "gram"), plain)
        got = ops.sqnorm(left, right, offsets, "gram")
    assert relative_error(got, plain) <= BOUND
    assert not got.requires_grad


@pytest.mark.skipif(not HAS_KERNELS, reason="without kernels torch multiplies, and its sums depend on the threads")
def test_threads_do_not_change_the_result():
    offsets = offsets_of([130, 67, 3])
    left, right = factor(200, 300, 1), factor(200, 200, 2)
    mask = torch.rand(300, 200) < 0.5
    ids = torch.randint(0, 9, (200,))
    by_threads(
        lambda: torch.cat(
            [
                ops.sqnorm(left, right, offsets, "gram"),
                ops.sqnorm(left, right, offsets, "direct"),
                ops.sqnorm(ids, right, offsets),
                ops.abs_sum(left, right, offsets),
                *ops.masked_sqnorm(left, right, offsets, mask),
                ops.abs_sum(ids, right, offsets),
                *ops.masked_sqnorm(ids, right, offsets, mask[:9]),
                ops.cross_inner(left, right, ids, right, offsets, offsets),
            ]
        )
    )


def test_compiled_calls_take_the_registered_op():
    offsets, left, right = offsets_of([4, 3]), factor(7, 5, 1), factor(7, 6, 2)
    compiled = torch.compile(lambda a, b: ops.sqnorm(a, b, offsets, "gram") + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(left, right), ops.sqnorm(left, right, offsets, "gram") + 1)
    weights = torch.rand(2)
    summed = torch.compile(
        lambda a, b: ops.weighted_sum(a, b, weights, offsets=offsets), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(summed(left, right), ops.weighted_sum(left, right, weights, offsets=offsets))


LEFT, RIGHT, OFFSETS = torch.ones(6, 3), torch.ones(6, 4), torch.tensor([0, 2, 6])
MASK, IDS = torch.ones(3, 4, dtype=torch.bool), torch.tensor([0, 1, 2, 3, 0, 0])
BAD = [
    (lambda: ops.sqnorm(LEFT[:, 0], RIGHT, OFFSETS), TypeError, "one-hot factors are int64 ids"),
    (lambda: ops.sqnorm(LEFT, RIGHT, OFFSETS[:0]), ValueError, "offsets have shape"),
    (lambda: ops.sqnorm(LEFT, RIGHT, OFFSETS, "ghost"), ValueError, "route is 'ghost'"),
    (lambda: ops.gram_norms([LEFT], [RIGHT, RIGHT], [1, 0], OFFSETS), ValueError, "lefts is empty"),
    (lambda: ops.gram_norms([IDS], [RIGHT], [1], OFFSETS), ValueError, "one-hot factors are in no group"),
    (lambda: ops.cross_inner(LEFT, RIGHT, LEFT, LEFT, OFFSETS, OFFSETS), ValueError, "right1 is 4 wide and right2 3"),
    (lambda: ops.cross_inner(LEFT, RIGHT, RIGHT, RIGHT, OFFSETS, OFFSETS), ValueError, "left1 is 3 wide and left2 4"),
    (lambda: ops.cross_inner(LEFT, RIGHT, LEFT, RIGHT, OFFSETS, OFFSETS[::2]), ValueError, "offsets1 cut 2 units"),
    (lambda: ops.cross_inner(IDS, RIGHT, LEFT, RIGHT, OFFSETS, OFFSETS), ValueError, "left1 has id 3: ids run"),
    (lambda: ops.cross_inner(LEFT, RIGHT, -IDS, RIGHT, OFFSETS, OFFSETS), ValueError, "left2 has id -3"),
    (lambda: ops.masked_sqnorm(IDS, RIGHT, OFFSETS, MASK), ValueError, "left has id 3: ids run from 0 to 2"),
    (lambda: OPS["norms"](LEFT, RIGHT, OFFSETS, MASKED_SQUARE, None), ValueError, "measure is 2"),
    (lambda: OPS["norms"](LEFT, RIGHT, OFFSETS, SQUARE, MASK), ValueError, "measure is 0"),
]


@cases("call, error, message", BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


@cases(*pairs(("dtype", DTYPES), ("size", [(8, 70), (70, 8), (129, 65)])))
def test_padding_changes_no_bit_and_is_no_token(size, dtype):
    """Zeros of one factor before, among and after a unit's tokens: what its norms are made of stays as it is."""
    own, padded = torch.tensor([0, 300]), torch.tensor([0, 700])
    left, right = factor(300, size[0], 0, dtype), factor(300, size[1], 1, dtype)
    places = torch.randperm(700, generator=torch.Generator().manual_seed(2))[:300].sort().values
    wide = left.new_zeros(700, size[0]).index_copy(0, places, left), factor(700, size[1], 3, dtype)
    wide[1][places] = right
    for one, two in ((wide, (left, right)), (wide[::-1], (right, left))):
        for measure in (
            lambda a, b, at: ops.sqnorm(a, b, at, "gram"),
            lambda a, b, at: ops.sqnorm(a, b, at, "direct"),
            lambda a, b, at: torch.stack(ops.gram_norms([a], [b], [1], at)),
            lambda a, b, at: ops.per_unit_group([a], [b], at)[0][0],
            lambda a, b, at: ops.per_unit_group([a], [b], at)[1],
            ops.abs_sum,
            lambda a, b, at: torch.stack(ops.row_products(a, b, at)),
        ):
            if HAS_KERNELS and dtype != torch.float64:
                assert torch.equal(measure(*one, padded), measure(*two, own))
        assert ops.token_counts([one[0]], [one[1]], padded).tolist() == [[300]]
