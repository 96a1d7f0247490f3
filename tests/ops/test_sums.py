"""Per-unit gradients and weighted sums against float64, and what a weight of zero keeps out."""

from itertools import pairwise

import pytest
import torch

from fastdp import ops
from tests.cases import cases, pairs

from .uses import DTYPES, RAGGED, factor, gradients, offsets_of, relative_error

LAYOUTS = ("plain", "rows", "transposed", "strided")
EXACT = 1e-5


def rounding(left, right, weights=None):
    """Twice what float32 may lose in a sum over these tokens: for each entry, gamma_N times the sum of magnitudes.

    A dot product of N terms errs by at most gamma_N = N u / (1 - N u) of the sum of its terms' magnitudes (Higham 2002,
    section 3.1), u = 2^-24; scaling by a weight adds one rounding to each term, adding to `out` one more.
    """
    left, right = left.double().abs(), right.double().abs()
    if weights is not None:
        right = right * weights.double().abs().unsqueeze(1)
    terms = (left.shape[0] + 3) * 2.0**-24
    return 2 * terms / (1 - terms) * (left.T @ right)


def assert_close(got, truth, bound):
    assert got.shape == truth.shape
    assert bool(torch.isfinite(got).all())
    assert bool(((got.double() - truth).abs() <= bound).all())


SMALL = ((4, 129), (129, 4), (1, 1), (16, 16), (0, 3))


@cases(*pairs(("layout", LAYOUTS), ("dtype", DTYPES), ("lengths", [RAGGED, (33, 33, 33), ()])))
def test_a_group_of_small_matrices(lengths, dtype, layout):
    offsets = offsets_of(lengths)
    tokens = int(offsets[-1])
    lefts = [factor(tokens, m, i, dtype, layout) for i, (m, _) in enumerate(SMALL)]
    rights = [factor(tokens, n, 9 + i, torch.float32 if i else dtype) for i, (_, n) in enumerate(SMALL)]
    made, norms = ops.per_unit_group(lefts, rights, offsets)
    assert norms.shape == (len(SMALL), len(lengths))
    for got, norm, left, right in zip(made, norms, lefts, rights):
        assert torch.equal(got, ops.per_unit(left, right, offsets))
        if lengths:
            truth = gradients(left, right, offsets)
            assert_close(got, truth, rounding(left, right))
            assert relative_error(norm, truth.square().sum((1, 2))) <= EXACT


def test_a_unit_of_a_group_is_its_own():
    offsets, left, right = offsets_of([3, 4, 2]), factor(9, 5, 1), factor(9, 6, 2)
    left[4, 1] = float("nan")
    (made, *_), norms = ops.per_unit_group([left, right], [right, left], offsets)
    assert norms.isfinite().tolist() == [[True, False, True]] * 2
    assert made.isfinite().all(2).all(1).tolist() == [True, False, True]


ZEROED = {
    "none": [],
    "a unit": list(range(40, 80)),
    "the first": [0],
    "every other": list(range(0, 150, 2)),
    "all": list(range(150)),
}


@cases(*pairs(("zeroed", ZEROED), ("poison", [float("nan"), float("inf")])))
def test_rows_of_weight_zero_never_reach_a_sum(zeroed, poison):
    left, right, weights = factor(150, 33, 1), factor(150, 65, 2), torch.rand(150) + 0.1
    weights[ZEROED[zeroed]] = 0
    truth = left.double().T @ (right.double() * weights.double().unsqueeze(1))
    bound = rounding(left, right, weights)
    ids = torch.randint(0, 9, (150,))
    table = torch.zeros(9, 65).double().index_add_(0, ids, right.double() * weights.double().unsqueeze(1))
    size = torch.zeros(9, 65).double().index_add_(0, ids, (right * weights.unsqueeze(1)).double().abs())
    left[ZEROED[zeroed]], right[ZEROED[zeroed]] = poison, poison
    assert_close(ops.weighted_sum(left, right, weights), truth, bound)
    assert_close(ops.weighted_sum(ids, right, weights, rows=9), table, 153 * 2.0**-23 * size)
    mask = torch.rand(33, 65) < 0.5
    assert_close(ops.masked_weighted_sum(left, right, weights, weights, mask), truth, bound)


@cases(*pairs(("dtype", [*DTYPES, torch.float64]), ("n", [1, 131, 700])))
def test_masked_sum_of_one_hot_rows(n, dtype):
    right, masked, unmasked = factor(150, n, 1, dtype, "rows"), torch.rand(150) - 0.5, torch.rand(150) - 0.5
    ids = torch.randint(0, 11, (300,), generator=torch.Generator().manual_seed(1))[::2]
    mask = torch.rand(12, n, generator=torch.Generator().manual_seed(2)) < 0.4
    masked[7], unmasked[9] = 0, 0
    masked[20] = unmasked[20] = 0
    sums, sizes = [], []
    for weights in (masked, unmasked):
        terms = right.double() * weights.double().unsqueeze(1)
        sums.append(torch.zeros(12, n).double().index_add_(0, ids, terms))
        sizes.append(torch.zeros(12, n).double().index_add_(0, ids, terms.abs()))
    truth, bound = torch.where(mask, *sums), 153 * 2.0**-23 * torch.where(mask, *sizes)
    right[20] = float("nan")
    got = ops.masked_weighted_sum(ids, right, masked, unmasked, mask)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(got, truth, bound)
    out = torch.ones(12, n)
    ops.masked_weighted_sum(ids, right.float(), masked, unmasked, mask, out)
    assert_close(out, truth + 1, bound + 2.0**-22 * (1 + truth.abs()))
    right[7] = float("nan")
    got = ops.masked_weighted_sum(ids, right, masked, unmasked, mask)
    assert torch.equal(got.isnan(), (torch.arange(12) == ids[7]).unsqueeze(1) & ~mask)


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


@cases(*pairs(("layout", ["plain", "transposed"]), ("dtype", [*DTYPES, torch.float64])))
def test_gradients_of_a_layer_norm(dtype, layout):
    """Against autograd in float64, over blocks of tokens and of columns, with an empty unit."""
    offsets = offsets_of([150, 0, 1, 70])
    gradient, x = factor(221, 600, 0, dtype, layout), factor(221, 600, 1, dtype, layout)
    _, mean, rstd = torch.native_layer_norm(x.double(), [600], None, None, 1e-5)
    means, scales = (row.reshape(-1).to(torch.promote_types(dtype, torch.float32)) for row in (mean, rstd))
    got = ops.affine_sums(gradient, x, means, scales, offsets)
    for unit, (start, end) in enumerate(pairwise(offsets.tolist())):
        weight, bias = (torch.full((600,), value, dtype=torch.float64, requires_grad=True) for value in (1.0, 0.0))
        out = torch.nn.functional.layer_norm(x[start:end].double(), [600], weight, bias)
        out.backward(gradient[start:end].double())
        for found, parameter in zip(got, (weight, bias)):
            assert found.dtype == means.dtype
            torch.testing.assert_close(found[unit].double(), parameter.grad, rtol=1e-5, atol=1e-4)


def test_float64_sums_stay_float64():
    left, right, weights = factor(20, 5, 1).double(), factor(20, 6, 2).double(), torch.rand(20)
    truth = left.T @ (right * weights.double().unsqueeze(1))
    got = ops.weighted_sum(left, right, weights)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, truth, rtol=1e-13, atol=1e-14)


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
    (lambda: ops.per_unit(LEFT, RIGHT, OFFSETS[1:]), ValueError, "offsets run from 2 to 6"),
    (lambda: ops.per_unit(LEFT, RIGHT, torch.tensor([0, 4, 2, 6])), ValueError, "decrease from 4 to 2 at unit 1"),
    (lambda: ops.per_unit_group([], [], OFFSETS), ValueError, "there are 0 lefts and 0 rights"),
    (lambda: ops.per_unit_group([LEFT], [RIGHT, RIGHT], OFFSETS), ValueError, "there are 1 lefts and 2 rights"),
    (lambda: ops.per_unit_group([LEFT, IDS], [RIGHT] * 2, OFFSETS), ValueError, r"lefts\[1\] is a vector of ids"),
    (
        lambda: ops.per_unit_group([LEFT, LEFT[1:]], [RIGHT, RIGHT[1:]], OFFSETS),
        ValueError,
        r"rights\[1\] has 5 tokens",
    ),
    (
        lambda: ops.per_unit_group([LEFT, LEFT.to("meta")], [RIGHT, RIGHT.to("meta")], OFFSETS),
        ValueError,
        r"is on meta and lefts on cpu",
    ),
    (lambda: ops.per_unit_group([LEFT], [RIGHT[1:]], OFFSETS), ValueError, r"lefts\[0\] has 6 tokens and rights\[0\]"),
    (lambda: ops.per_unit_group([LEFT.long()], [RIGHT], OFFSETS), TypeError, r"lefts\[0\] is torch.int64"),
    (lambda: ops.per_unit_group([LEFT], [RIGHT], OFFSETS.int()), TypeError, "offsets are torch.int32"),
    (lambda: ops.column_sums(IDS, OFFSETS), ValueError, "left is a vector of ids"),
    (lambda: ops.column_sums(LEFT, OFFSETS[:1]), ValueError, "offsets run from 0 to 0"),
    (lambda: ops.affine_sums(LEFT, RIGHT, WEIGHTS, WEIGHTS, OFFSETS), ValueError, "both are"),
    (lambda: ops.affine_sums(LEFT, LEFT, WEIGHTS[1:], WEIGHTS, OFFSETS), ValueError, "mean is"),
    (lambda: ops.affine_sums(LEFT, LEFT, WEIGHTS, WEIGHTS.int(), OFFSETS), ValueError, "rstd is"),
    (lambda: ops.affine_sums_group([LEFT], [], [], [], OFFSETS), ValueError, "there are 1 gradients, 0 xs"),
    (lambda: ops.weighted_sum(LEFT, RIGHT, WEIGHTS[:5]), ValueError, r"weights have shape \(5,\)"),
    (
        lambda: ops.weighted_sum(LEFT, RIGHT, WEIGHTS, offsets=OFFSETS),
        ValueError,
        r"weights have shape \(6,\): one a unit is \(2,\)",
    ),
    (lambda: ops.weighted_sum(LEFT, RIGHT, WEIGHTS[:2], offsets=OFFSETS[1:]), ValueError, "offsets run from 2 to 6"),
    (lambda: ops.weighted_sum(LEFT, RIGHT, WEIGHTS.half()), TypeError, "weights are torch.float16"),
    (lambda: ops.weighted_sum(LEFT, RIGHT, WEIGHTS.to("meta")), ValueError, "weights is on meta"),
    (lambda: ops.weighted_sum(LEFT, RIGHT, WEIGHTS, torch.zeros(4, 3)), ValueError, r"out has shape \(4, 3\)"),
    (lambda: ops.weighted_sum(LEFT, RIGHT, WEIGHTS, MASK), TypeError, "out is torch.bool"),
    (lambda: ops.weighted_sum(IDS, RIGHT, WEIGHTS), ValueError, "state the rows of the table"),
    (lambda: ops.weighted_sum(IDS + 9, RIGHT, WEIGHTS, rows=9), ValueError, "left has id 9: ids run from 0 to 8"),
    (lambda: ops.weighted_sum(IDS - 1, RIGHT, WEIGHTS, torch.zeros(9, 4)), ValueError, "left has id -1"),
    (lambda: ops.weighted_sum(LEFT, RIGHT, WEIGHTS, rows=5), ValueError, "rows is 5, but left is 3 wide"),
    (
        lambda: ops.masked_weighted_sum(IDS + 3, RIGHT, WEIGHTS, WEIGHTS, MASK),
        ValueError,
        "left has id 3: ids run from 0 to 2",
    ),
    (
        lambda: ops.masked_weighted_sum(LEFT, RIGHT, WEIGHTS, WEIGHTS[1:], MASK),
        ValueError,
        "weights_unmasked have shape",
    ),
    (lambda: ops.masked_weighted_sum(LEFT, RIGHT, WEIGHTS, WEIGHTS, MASK[1:]), ValueError, "mask has shape"),
]


@cases("call, error, message", BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
