"""Weighted sums in Triton against float64, with the bound of their own arithmetic."""

import pytest
import torch
from fastdp.kernels.instances import instance_sum
from fastdp.kernels.onehot import onehot_weighted_sum_
from fastdp.kernels.weighted import weighted_sum_

from fastdp import ops
from fastdp.ops.table import OPS
from tests.ops.uses import DTYPES, factor

NAN = float("nan")


def exact(left, right, weights):
    """The sum and the sum of absolute terms, float64; rows of weight 0 left out."""
    keep = weights != 0
    left, right, weights = left[keep].double(), right[keep].double(), weights[keep].double()
    return left.T @ (weights[:, None] * right), left.abs().T @ (weights.abs()[:, None] * right.abs())


def bound(tokens, dtype, rounded):
    """Relative to the absolute terms: float32 sums, and where a block mixes weights a rounding of its rows."""
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    return (tokens + 8) * 2.0**-24 + (rounding if rounded else 0.0)


@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "m", "n"), [(129, 7, 133), (1, 1, 1), (70, 65, 17)])
def test_weighted_sums(tokens, m, n, dtype, layout):
    left, right = factor(tokens, m, 0, dtype, layout), factor(tokens, n, 1, dtype, layout)
    weights, others = torch.rand(tokens), torch.rand(tokens)
    if tokens > 50:
        weights[20:23] = others[20:23] = 0.0
        left[20, 0], right[21, 0], right[22, 0] = NAN, NAN, float("inf")
        weights[30] = others[40] = 0.0
    mask = torch.rand(m, n) < 0.3
    start = torch.randn(n, m).T
    truth, size = exact(left, right, weights)
    other, other_size = exact(left, right, others)
    both = torch.where(mask, truth, other), torch.where(mask, size, other_size)
    for splits in (1, 3):
        out = start.clone()
        weighted_sum_(out, left, right, weights, splits=splits)
        limit = bound(tokens, dtype, True)
        assert bool(((out - start - truth).abs() <= limit * size + 1e-6 * (start.abs() + size)).all())
        out = start.clone()
        weighted_sum_(out, left, right, weights, others, mask, splits=splits)
        assert bool(((out - start - both[0]).abs() <= limit * both[1] + 1e-6 * (start.abs() + both[1])).all())


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_one_weight_a_block_rounds_no_row(dtype):
    """A clipped unit of 16-bit factors is as long as it was clipped to: the bound is float32's."""
    tokens = 192
    left, right = factor(tokens, 9, 0, dtype), factor(tokens, 12, 1, dtype)
    weights = torch.tensor([0.3712, 1.0, 0.0071]).repeat_interleave(64)
    out = torch.zeros(9, 12)
    weighted_sum_(out, left, right, weights)
    truth, size = exact(left, right, weights)
    assert bool(((out - truth).abs() <= bound(tokens, dtype, False) * size).all())
    out = torch.zeros(9, 12)
    mask = torch.rand(9, 12) < 0.5
    weighted_sum_(out, left, right, weights, weights.flip(0), mask)
    other, other_size = exact(left, right, weights.flip(0))
    error = (out - torch.where(mask, truth, other)).abs()
    assert bool((error <= bound(tokens, dtype, False) * torch.where(mask, size, other_size)).all())


def test_masked_selection_on_both_factors():
    """A token that counts only outside the mask may be NaN without touching what lies inside."""
    left, right = factor(5, 6, 0), factor(5, 7, 1)
    right[2] = NAN
    inside, outside = torch.rand(5), torch.rand(5)
    inside[2] = 0.0
    mask = torch.rand(6, 7) < 0.5
    out = torch.zeros(6, 7)
    weighted_sum_(out, left, right, inside, outside, mask)
    torch.testing.assert_close(out[mask], exact(left, right, inside)[0].float()[mask])
    assert bool(out[~mask].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_hot_sums(dtype):
    tokens, vocabulary, n = 41, 6, 300
    ids, right, weights = (
        torch.randint(0, 2 * vocabulary, (tokens,)) // 2,
        factor(tokens, n, 1, dtype, "strided"),
        torch.rand(tokens),
    )
    weights[3] = 0.0
    right[3] = NAN
    start = torch.randn(n, vocabulary).T
    out = start.clone()
    onehot_weighted_sum_(out, ids, right, weights)
    rows = torch.where(weights[:, None] != 0, right.double(), 0.0) * weights[:, None].double()
    truth = start.double().clone().index_add_(0, ids, rows)
    size = start.double().abs().index_add_(0, ids, rows.abs())
    assert bool(((out - truth).abs() <= 20 * 2.0**-24 * size).all())
    others, mask = torch.rand(tokens), torch.rand(2 * vocabulary, n)[::2] < 0.4
    others[3] = 0.0
    rows = torch.where(others[:, None] != 0, right.double(), 0.0) * others[:, None].double()
    other = start.double().clone().index_add_(0, ids, rows)
    size = torch.maximum(size, start.double().abs().index_add_(0, ids, rows.abs()))
    out = start.clone()
    onehot_weighted_sum_(out, ids, right, weights, others, mask)
    assert bool(((out - torch.where(mask, truth, other)).abs() <= 20 * 2.0**-24 * size).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("units", "shape"), [(5, (7, 13)), (2, (1025,)), (3, (0,)), (0, (5,))])
def test_sums_of_instantiated_gradients(units, shape, dtype):
    given, weights, others = torch.randn(units, *shape).to(dtype), torch.rand(units), torch.rand(units)
    mask = torch.rand(shape) < 0.4
    if units > 2:
        weights[1], others[2] = 0.0, 0.0
        weights[0] = others[0] = 0.0
        given[0] = NAN
    wide = given.double().flatten(1).nan_to_num()
    sums = [(w.double() @ wide).view(shape) for w in (weights, others)]
    bound = 8 * 2.0**-24 * wide.abs().sum(0).view(shape)
    assert bool(((instance_sum(given, weights, None, None) - sums[0]).abs() <= bound).all())
    got = instance_sum(given, weights, others, mask)
    assert bool(((got - torch.where(mask, *sums)).abs() <= bound).all())


def test_ops_reach_the_kernels(as_on_a_gpu):
    left, right, weights = factor(9, 5, 0), factor(9, 4, 1), torch.rand(9)
    truth = exact(left, right, weights)[0].float()
    torch.testing.assert_close(ops.weighted_sum(left, right, weights), truth)
    mask = torch.rand(5, 4) < 0.5
    both = ops.masked_weighted_sum(left, right, weights, 2 * weights, mask)
    torch.testing.assert_close(both, torch.where(mask, truth, 2 * truth))
    ids = torch.randint(0, 6, (9,))
    summed = ops.weighted_sum(ids, right, weights, rows=6)
    torch.testing.assert_close(summed, torch.zeros(6, 4).index_add_(0, ids, weights[:, None] * right))
    with pytest.raises(RuntimeError, match="outside the table"):
        OPS["weighted_sum_"].on("cpu", summed[: int(ids.max())], ids + 1, right, weights, None, None)
    out = torch.zeros(5, 4, dtype=torch.float64)
    ops.weighted_sum(left, right, weights, out)
    torch.testing.assert_close(out.float(), truth)
    assert not ops.weighted_sum(left[:0], right[:0], weights[:0]).any()
