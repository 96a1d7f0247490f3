"""Per-unit gradients and weighted sums against float64, and what a weight of zero keeps out."""

import pytest
import torch

from fastdp import ops
from tests.cases import cases

from .uses import factor, offsets_of


def test_a_unit_of_a_group_is_its_own():
    offsets, left, right = offsets_of([3, 4, 2]), factor(9, 5, 1), factor(9, 6, 2)
    left[4, 1] = float("nan")
    (made, *_), norms = ops.per_unit_group([left, right], [right, left], offsets)
    assert norms.isfinite().tolist() == [[True, False, True]] * 2
    assert made.isfinite().all(2).all(1).tolist() == [True, False, True]


def test_a_weight_of_zero_keeps_nan_out_of_its_part_only():
    left, right = torch.ones(20, 70), torch.ones(20, 130)
    left[:10] = float("nan")
    masked, unmasked = torch.ones(20), torch.ones(20)
    masked[:10] = 0
    mask = torch.zeros(70, 130, dtype=torch.bool)
    mask[:, ::3] = True
    got = ops.masked_weighted_sum(left, right, masked, unmasked, mask)
    assert torch.equal(got.isnan(), ~mask)
    assert bool((got[mask] == 10).all())
    right[:10], ids = float("nan"), torch.arange(20) // 10
    got = ops.masked_weighted_sum(ids, right, masked, unmasked, mask[:2])
    assert torch.equal(got.isnan(), torch.stack([~mask[0], torch.zeros(130, dtype=torch.bool)]))


def test_float64_sums_stay_float64():
    left, right, weights = factor(20, 5, 1).double(), factor(20, 6, 2).double(), torch.rand(20)
    truth = left.T @ (right * weights.double().unsqueeze(1))
    got = ops.weighted_sum(left, right, weights)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, truth, rtol=1e-13, atol=1e-14)
    (scaled,), (plain,) = ops.affine_sums(left, left, weights, weights, offsets_of([20]))
    wanted = (left * (left - weights[:, None]) * weights[:, None]).sum(0)
    torch.testing.assert_close(scaled, wanted.to(scaled.dtype), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(plain, left.sum(0).to(plain.dtype), rtol=1e-13, atol=1e-13)


def test_autocast_does_not_round_a_sum():
    left, right, weights = factor(20, 5, 1), factor(20, 6, 2), torch.rand(20)
    with torch.autocast("cpu", torch.bfloat16):
        got = ops.weighted_sum(left, right, weights)
        gradient = ops.per_unit(left, right, offsets_of([20]))
    assert torch.equal(got, ops.weighted_sum(left, right, weights))
    assert torch.equal(gradient, ops.per_unit(left, right, offsets_of([20])))


def test_a_sum_into_out_allocates_no_matrix_of_its_size():
    left, right, weights = factor(16, 1024, 1), factor(16, 2048, 2), torch.rand(16)
    out = torch.zeros(1024, 2048)
    with torch.profiler.profile(profile_memory=True) as profile:
        ops.weighted_sum(left, right, weights, out=out)
    taken = [event.cpu_memory_usage for event in profile.events() if event.cpu_memory_usage > 0]
    assert taken
    assert sum(taken) < out.nbytes / 4


LEFT, RIGHT, OFFSETS, WEIGHTS = torch.ones(6, 3), torch.ones(6, 4), torch.tensor([0, 2, 6]), torch.ones(6)
IDS, MASK = torch.zeros(6, dtype=torch.int64), torch.ones(3, 4, dtype=torch.bool)
BAD = [
    (lambda: ops.per_unit(IDS, RIGHT, OFFSETS), ValueError, "left is a vector of ids"),
    (lambda: ops.per_unit_group([], [], OFFSETS), ValueError, "there are 0 lefts and 0 rights"),
    (lambda: ops.per_unit_group([LEFT], [RIGHT, RIGHT], OFFSETS), ValueError, "there are 1 lefts and 2 rights"),
    (lambda: ops.per_unit_group([LEFT, IDS], [RIGHT] * 2, OFFSETS), ValueError, r"lefts\[1\] is a vector of ids"),
    (lambda: ops.column_sums(IDS, OFFSETS), ValueError, "left is a vector of ids"),
    (lambda: ops.affine_sums(LEFT, RIGHT, WEIGHTS, WEIGHTS, OFFSETS), ValueError, "both are"),
    (lambda: ops.affine_sums_group([LEFT], [], [], [], OFFSETS), ValueError, "there are 1 gradients, 0 xs"),
    (lambda: ops.weighted_sum(IDS, RIGHT, WEIGHTS), ValueError, "state the rows of the table"),
    (lambda: ops.weighted_sum(IDS + 9, RIGHT, WEIGHTS, rows=9), ValueError, "left has id 9: ids run from 0 to 8"),
    (lambda: ops.weighted_sum(IDS - 1, RIGHT, WEIGHTS, torch.zeros(9, 4)), ValueError, "left has id -1"),
    (lambda: ops.weighted_sum(LEFT, RIGHT, WEIGHTS, rows=5), ValueError, "rows is 5, but left is 3 wide"),
    (lambda: ops.masked_weighted_sum(IDS + 3, RIGHT, WEIGHTS, WEIGHTS, MASK), ValueError, "left has id 3: ids run"),
]


@cases("call, error, message", BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
