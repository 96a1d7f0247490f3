"""Weighted sums in Triton against float64, with the bound of their own arithmetic."""

import pytest
import torch
from fastdp.kernels import affine, launch, sums, weighted
from fastdp.kernels.blocks import COUNT_MASK, UNIT_SHIFT, blocks_of
from fastdp.kernels.onehot import onehot_weighted_sum_
from fastdp.kernels.sums import weighted_sum_
from fastdp.kernels.weighted import weighted_sums_

from fastdp import ops
from fastdp.ops.table import OPS
from tests.ops.uses import DTYPES, factor, gradients, offsets_of

NAN = float("nan")


def exact(left, right, weights):
    """The sum and the sum of absolute terms, float64; rows of weight 0 left out."""
    keep = weights != 0
    left, right, weights = left[keep].double(), right[keep].double(), weights[keep].double()
    return left.T @ (weights[:, None] * right), left.abs().T @ (weights.abs()[:, None] * right.abs())


def bound(tokens):
    """Relative to the absolute terms: float32 sums of exact products, and a weight."""
    return (tokens + 8) * 2.0**-24


def add_weighted(out, left, right, weights, offsets, dealt=None):
    """The sum of one matrix, added to ``out``."""
    weighted_sums_([out], [left], [right], weights.unsqueeze(0), offsets, [True], dealt=dealt)


def spread(weights, offsets):
    return weights.repeat_interleave(offsets.diff())


@pytest.mark.parametrize("dealt", [(1, 1), (0, 3)])
def test_weights_far_apart(dealt):
    """One accumulator goes from unit to unit: no weight is lost beside another, and units of weight 0 are not read."""
    lengths = (20, 1, 70, 0, 5, 64, 3, 9)
    offsets = offsets_of(lengths)
    left, right = factor(172, 9, 0, torch.bfloat16), factor(172, 12, 1, torch.bfloat16)
    weights = torch.tensor([0.0, 2.0**-60, 1.0, 5.0, 2.0**-58, 0.0, -0.3, 0.0])
    for start, end in ((0, 20), (96, 160), (163, 172)):
        left[start:end], right[start:end] = NAN, float("inf")
    for own in (weights, torch.where(weights.abs() > 2.0**-50, 0.0, weights)):
        truth, size = exact(left, right, spread(own, offsets))
        out = torch.zeros(9, 12)
        add_weighted(out, left, right, own, offsets, dealt)
        assert bool(((out - truth).abs() <= (bound(172) + 2 * len(lengths) * 2.0**-24) * size).all())


def test_wide_tiles(monkeypatch):
    """Of large GPUs."""
    monkeypatch.setattr(weighted, "has_wide_tiles", lambda device: True)
    offsets, weights = offsets_of((30, 40)), torch.tensor([0.9, 0.2])
    left, right = factor(70, 130, 0, torch.bfloat16), factor(70, 264, 1, torch.bfloat16)
    truth, size = exact(left, right, spread(weights, offsets))
    for dealt in ((4, 1), (0, 2)):
        out = torch.zeros(130, 264)
        add_weighted(out, left, right, weights, offsets, dealt)
        assert bool(((out - truth).abs() <= bound(70) * size + 1e-6 * size).all())


def test_many_matrices_in_one_launch():
    """Sums that hold nothing yet are written whole, whatever was in their memory; others are added to."""
    offsets, sizes = offsets_of((20, 0, 33, 7)), [(40, 24), (3, 8), (24, 40), (16, 16)]
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]
    lefts = [factor(60, m, i, dtype) for i, ((m, _), dtype) in enumerate(zip(sizes, dtypes))]
    rights = [factor(60, n, 9 + i, dtype) for i, ((_, n), dtype) in enumerate(zip(sizes, dtypes))]
    weights = torch.rand(4, 4)
    weights[0, 2] = 0.0
    lefts[0][21] = NAN
    begun = [False, True, False, True]
    starts = [torch.randn(size) if held else torch.zeros(size) for size, held in zip(sizes, begun)]
    for dealt in (None, (0, 2), (1, 2)):
        outs = [start.clone() if held else torch.full_like(start, NAN) for start, held in zip(starts, begun)]
        weighted_sums_(outs, lefts, rights, weights, offsets, begun, dealt=dealt)
        for out, start, left, right, row in zip(outs, starts, lefts, rights, weights):
            truth, size = exact(left, right, spread(row, offsets))
            assert bool(((out - start - truth).abs() <= bound(60) * size + 1e-6 * (start.abs() + size)).all())
    empty = [torch.full((2, 3), NAN)]
    weighted_sums_(
        empty, [lefts[0][:0, :2]], [rights[0][:0, :3]], weights[:1], torch.zeros(5, dtype=torch.int64), [False]
    )
    assert not empty[0].any()


@pytest.mark.parametrize("lengths", [(40,), (20, 20), (7, 0, 32, 1), (0, 0)])
def test_wide_gradients_of_units_that_the_host_cuts(lengths):
    """A product each: by the kernel of sums, and by torch's own where it gives float32."""
    tokens, offsets = sum(lengths), offsets_of(lengths)
    left, right = factor(tokens, 70, 0, torch.bfloat16), factor(tokens, 130, 1, torch.bfloat16)
    got = sums.per_unit(left, right, offsets)
    for gradient, start, end in zip(got, offsets.tolist(), offsets.tolist()[1:]):
        truth, size = exact(left[start:end], right[start:end], torch.ones(end - start))
        assert bool(((gradient - truth).abs() <= bound(end - start) * size).all())
    there = sums.per_unit(left.to("meta"), right.to("meta"), offsets)
    assert (there.shape, there.dtype) == (got.shape, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_layer_norm(dtype, monkeypatch):
    offsets = offsets_of((20, 0, 33, 7))
    gradient, x = factor(60, 70, 0, dtype, "transposed"), factor(60, 70, 1, dtype)
    x[21, 3] = NAN
    mean, rstd = torch.rand(60), torch.rand(60)
    gradients, xs = [gradient, x, gradient.float()], [x, gradient, gradient]
    means, rstds = [mean, rstd[None], mean.bfloat16()], [rstd] * 3
    of = OPS["affine_sums_group"].reference
    truth = of([own.double() for own in gradients], [own.double() for own in xs], means, rstds, offsets)
    sizes = [[own.double().abs() for own in each] for each in (gradients, xs)]
    size = of(*sizes, [-own for own in means], rstds, offsets)
    for splits in (1, 3):
        monkeypatch.setattr(affine, "splits_to_fill", lambda *_, splits=splits: splits)
        got = affine.affine_sums_group(gradients, xs, means, rstds, offsets)
        assert torch.equal(got.isnan(), truth.isnan())
        assert bool((((got - truth).abs() <= 40 * 2.0**-24 * size) | truth.isnan()).all())


def test_blocks_hold_tokens_of_one_unit():
    offsets = offsets_of((1100, 530, 40))
    table, slots = blocks_of(offsets, 1670, 64)
    blocks = int(table[0])
    starts, words = table[1 : 1 + blocks].tolist(), table[1 + slots :][:blocks].tolist()
    counts = [word & COUNT_MASK.value for word in words]
    assert starts == [sum(counts[:i]) for i in range(blocks)]
    assert sum(counts) == 1670
    assert [word >> UNIT_SHIFT.value for word in words] == [0] * 18 + [1] * 9 + [2]
    offsets[1] = 1024
    assert int(blocks_of(offsets, 1670, 64)[0][0]) == 16 + 10 + 1


def test_masked_selection_on_both_factors():
    """A token that counts only outside the mask may be NaN without touching what lies inside."""
    left, right = factor(5, 6, 0), factor(5, 7, 1)
    right[2] = NAN
    inside, outside = torch.rand(5), torch.rand(5)
    inside[2] = 0.0
    mask = torch.rand(6, 7) < 0.5
    out = torch.zeros(6, 7)
    weighted_sum_(out, left, right, inside, outside, mask, None)
    torch.testing.assert_close(out[mask], exact(left, right, inside)[0].float()[mask])
    assert bool(out[~mask].isnan().all())


def test_runs_longer_than_a_chunk():
    """Token types and padding: one id from end to end, and one that begins and ends within chunks, beside short runs."""
    ids = torch.cat([torch.arange(30), torch.full((70,), 30), torch.full((540,), 31), torch.arange(32, 35)])
    tokens = ids.shape[0]
    ids = ids[torch.randperm(tokens)]
    right, weights, others = factor(tokens, 9, 1), torch.rand(tokens), torch.rand(tokens)
    weights[ids == 30] *= torch.rand(70) < 0.9
    right[weights == 0] = NAN
    others[weights == 0] = 0.0
    mask = torch.rand(35, 9) < 0.5
    truths = []
    for each in (weights, others):
        rows = torch.where(each[:, None] != 0, right.double(), 0.0) * each[:, None].double()
        zero = torch.zeros(35, 9, dtype=torch.float64)
        truths.append((zero.index_add(0, ids, rows), zero.index_add(0, ids, rows.abs())))
    out, both = torch.zeros(35, 9), torch.zeros(35, 9)
    onehot_weighted_sum_(out, ids, right, weights)
    onehot_weighted_sum_(both, ids, right, weights, others, mask)
    (truth, size), (other, other_size) = truths
    assert bool(((out - truth).abs() <= 24 * 2.0**-24 * size).all())
    assert bool(
        ((both - torch.where(mask, truth, other)).abs() <= 24 * 2.0**-24 * torch.maximum(size, other_size)).all()
    )


def test_the_way_out_of_what_no_kernel_takes(as_on_a_gpu):
    left, right, weights = factor(9, 5, 0), factor(9, 4, 1), torch.rand(9)
    with pytest.raises(RuntimeError, match="outside the table"):
        OPS["weighted_sum_"].on("cpu", torch.zeros(5, 4), torch.full((9,), 5), right, weights, None, None, None)
    out = torch.zeros(5, 4, dtype=torch.float64)
    ops.weighted_sum(left, right, weights, out)
    torch.testing.assert_close(out.float(), exact(left, right, weights)[0].float())
    assert not ops.weighted_sum(left[:0], right[:0], weights[:0]).any()
    assert not ops.instance_sum(torch.randn(0, 5), weights[:0]).any()


def test_sums_of_many_units_are_made_of_parts(as_on_a_gpu, monkeypatch):
    """How often the sum of a unit is rounded does not depend on how many units there are."""
    offsets = offsets_of((7, 0, 33, 20, 1, 12, 40))
    left, right, weights = factor(113, 18, 0), factor(113, 24, 1), torch.rand(7)
    monkeypatch.setattr(sums, "MOST_UNITS", 3)
    launched = []
    made = weighted.weighted_sums_
    monkeypatch.setattr(weighted, "weighted_sums_", lambda *own: (launched.append(own[3].shape[1]), made(*own)))
    truth = torch.tensordot(weights.double(), gradients(left, right, offsets), 1)
    before = torch.randn(18, 24)
    outs = [None, before.clone()]
    made_here = ops.weighted_sum_group([left] * 2, [right] * 2, torch.stack([weights] * 2), offsets, outs)
    made_here.append(ops.weighted_sum(left, right, weights, before.clone(), offsets=offsets))
    for found, begun in zip(made_here, (0, before.double(), before.double())):
        assert float((found.double() - begun - truth).norm()) <= 1e-6 * float(truth.norm())
    assert launched == [3, 3, 1] * 2


@pytest.mark.parametrize("lengths", [(64, 128, 64), (64, 100, 30)])
def test_described_factors_are_left_out_with_weight_0(lengths, monkeypatch):
    """Full blocks go by the copy engine, others by masked loads; a unit of weight 0 may hold NaN."""
    monkeypatch.setattr(launch, "has_wide_tiles", lambda device: True)
    offsets, tokens = offsets_of(lengths), sum(lengths)
    left, right = factor(tokens, 24, 0, torch.bfloat16), factor(tokens, 40, 1, torch.bfloat16)
    weights = torch.tensor([[0.5, 0.0, 1.5]])
    wanted = torch.einsum("b,bmn->mn", weights[0].double(), gradients(left, right, offsets))
    left[64 : 64 + lengths[1]], out = float("nan"), torch.full((24, 40), 0.25)
    weighted.weighted_sums_([out], [left], [right], weights, offsets, [True])
    torch.testing.assert_close(out.double(), wanted + 0.25, rtol=1e-5, atol=1e-4)
