"""Norms and inner products in Triton against float64, one unit at a time, on odd shapes, dtypes and layouts."""

import pytest
import torch
from fastdp.kernels import cross, direct, gram, grouped, launch, onehot, weighted

from fastdp import ops
from fastdp.ops.factors import ABSOLUTE, MASKED_SQUARE, SQUARE
from fastdp.ops.table import OPS
from tests.cases import pairs
from tests.ops.uses import DTYPES, RAGGED, factor, gradients, offsets_of, relative_error

BOUND = 1e-5  # what docs/kernels.md promises; 16-bit factors are widened exactly, so it holds for every dtype


def squared(left, right, offsets, rows=None):
    return gradients(left, right, offsets, rows).square().sum((1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_cannot_be_read_16_bytes_at_a_time_are_copied(dtype, monkeypatch):
    monkeypatch.setattr(launch, "LARGE_MATRIX", 1)
    offsets = offsets_of(RAGGED)
    left, right = factor(int(offsets[-1]), 13, 0, dtype), factor(int(offsets[-1]), 16, 1, dtype)
    longer, same = launch.with_wide_rows([left, right])
    assert longer.stride(0) == 16
    assert same is right
    truth = squared(left, right, offsets)
    every = torch.ones(1, len(RAGGED), dtype=torch.bool)
    for found in (
        gram.gram_norms([left], [right], [1], offsets)[0][0],
        direct.direct_norms(left, right, offsets, SQUARE)[0],
        direct.chosen_norms([left], [right], offsets, every)[0],
    ):
        assert relative_error(found, truth) <= BOUND
    weights = torch.rand(1, len(RAGGED))
    wanted = torch.einsum("b,bmn->mn", weights[0].double(), gradients(left, right, offsets))
    for begun in (False, True):
        out = torch.full((13, 16), 0.5)
        weighted.weighted_sums_([out], [left], [right], weights, offsets, [begun])
        torch.testing.assert_close(out.double(), wanted + 0.5 * begun, rtol=1e-5, atol=1e-5)


def test_one_hot_runs_longer_than_a_chunk():
    offsets = offsets_of((40, 0, 300, 3, 65))
    ids, right = torch.randint(0, 2, (408,)), factor(408, 7, 0)
    ids[40:340] = 1
    table, mask = gradients(ids, right, offsets, 2), torch.rand(2, 7) < 0.5
    squares = table.square()
    assert relative_error(onehot.onehot_norms(ids, right, offsets, SQUARE)[0], squares.sum((1, 2))) <= BOUND
    assert relative_error(onehot.onehot_norms(ids, right, offsets, ABSOLUTE)[0], table.abs().sum((1, 2))) <= BOUND
    parts = torch.stack([(squares * mask).sum((1, 2)), (squares * ~mask).sum((1, 2))])
    assert relative_error(onehot.onehot_norms(ids, right, offsets, MASKED_SQUARE, mask), parts) <= BOUND


def test_wide_tiles(monkeypatch):
    monkeypatch.setattr(direct, "has_wide_tiles", lambda device: True)
    offsets = offsets_of((5, 0, 12))
    left, right = factor(17, 100, 0, torch.bfloat16), factor(17, 260, 1, torch.bfloat16)
    assert relative_error(direct.direct_norms(left, right, offsets, SQUARE)[0], squared(left, right, offsets)) <= BOUND
    sizes = gradients(left, right, offsets).abs().sum((1, 2))
    assert relative_error(direct.direct_norms(left, right, offsets, ABSOLUTE)[0], sizes) <= BOUND


@pytest.mark.parametrize(*pairs(("kinds", ["dense-dense", "ids-dense", "dense-ids", "ids-ids"]), ("dtype", DTYPES[:2])))
def test_cross_terms_of_tied_weights(kinds, dtype):
    lengths, others = (5, 0, 7, 70, 4), (3, 4, 0, 33, 1)
    offsets1, offsets2 = offsets_of(lengths), offsets_of(others)
    vocabulary, n = 11, 33
    right1, right2 = factor(sum(lengths), n, 0, dtype, "strided"), factor(sum(others), n, 1, dtype)
    lefts = []
    for kind, tokens in zip(kinds.split("-"), (sum(lengths), sum(others))):
        lefts.append(
            torch.randint(0, vocabulary, (tokens,))
            if kind == "ids"
            else factor(tokens, vocabulary, 2, dtype, "transposed")
        )
    one = gradients(lefts[0], right1, offsets1, vocabulary)
    two = gradients(lefts[1], right2, offsets2, vocabulary)
    truth, size = (one * two).sum((1, 2)), (one.norm(dim=(1, 2)) * two.norm(dim=(1, 2)))
    for splits in (1, 2):
        got = cross.cross_inner(lefts[0], right1, lefts[1], right2, offsets1, offsets2, splits=splits)
        assert bool(((got - truth).abs() <= BOUND * size).all())


@pytest.fixture
def launches(monkeypatch):
    """The grids that the grouped kernel is launched on, in order."""
    kernel, grids = grouped._grouped_kernel, []

    class Counted:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(grouped, "_grouped_kernel", Counted())
    return grids


def test_the_adapters_of_a_model_are_one_launch(launches):
    offsets = offsets_of((3, 0, 6))
    wide = [factor(9, 24, i) for i in range(16)]
    narrow = [factor(9, 4, 100 + i) for i in range(16)]
    made, norms = OPS["per_unit_group"].on("cuda", narrow + wide, wide + narrow, offsets)
    assert launches == [(32, 3, 1)]
    for got, norm, left, right in zip(made, norms, narrow + wide, wide + narrow):
        truth = gradients(left, right, offsets)
        torch.testing.assert_close(got, truth.float())
        assert relative_error(norm, truth.square().sum((1, 2))) <= BOUND


def test_many_matrices_in_one_launch():
    offsets = offsets_of((5, 0, 42))
    shapes = ((4, 33), (257, 8), (16, 48), (1, 1))
    lefts = [factor(47, m, i, layout="transposed" if i == 0 else "plain") for i, (m, _) in enumerate(shapes)]
    rights = [factor(47, n, 10 + i) for i, (_, n) in enumerate(shapes)]
    lefts.append(factor(47, 17, 20, torch.bfloat16))
    rights.append(factor(47, 16, 21, torch.bfloat16))
    for splits in (1, 2):
        got, norms = grouped.per_unit_group(lefts, rights, offsets, splits=splits)
        for part, norm, left, right in zip(got, norms, lefts, rights):
            truth = gradients(left, right, offsets)
            size = gradients(left.abs(), right.abs(), offsets)
            assert bool(((part - truth).abs() <= 50 * 2.0**-24 * size).all())
            assert relative_error(norm, truth.square().sum((1, 2))) <= BOUND


def test_gram_matrices_of_described_factors(monkeypatch):
    """The copy engine reads rows of the next unit, here NaN, and columns past the last."""
    offsets = offsets_of((5, 130, 9, 3))
    lefts, right = (
        [factor(147, width, width, torch.bfloat16) for width in (24, 136)],
        factor(147, 40, 1, torch.bfloat16),
    )
    right[135:144] = float("nan")
    found = []
    for described in (False, True):
        monkeypatch.setattr(launch, "has_wide_tiles", lambda device, own=described: own)
        norms, products = gram.gram_norms(lefts, [right], [2], offsets)
        assert norms.isfinite().tolist() == [[True, True, False, True]] * 2
        for left, own in zip(lefts, norms):
            squares = squared(left, right, offsets)
            assert relative_error(own[squares.isfinite()], squares[squares.isfinite()]) <= BOUND
        found += [norms, products]
    for one, other in zip(found[:2], found[2:]):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize(("rows", "described"), [("apart", True), ("windows", False), ("expanded", False)])
def test_rows_that_share_memory_are_not_described(rows, described, monkeypatch):
    """Windows of one sequence, as unfolded convolutions have, and one row for every token: read, but not by the copy engine."""
    strides, offsets, found = {"apart": 24, "windows": 8, "expanded": 0}[rows], offsets_of((64, 128)), []
    left = factor(1, 24 * 192, 0, torch.bfloat16).as_strided((192, 24), (strides, 1))
    right, weights, out = factor(192, 40, 1, torch.bfloat16), torch.tensor([[0.5, 1.5]]), torch.zeros(24, 40)
    monkeypatch.setattr(launch, "has_wide_tiles", lambda device: True)
    enable = launch.enable_descriptors
    for module in (gram, weighted):
        monkeypatch.setattr(module, "enable_descriptors", lambda *given: (found.append(enable(*given)), found[-1])[1])
    norms, _ = gram.gram_norms([left], [right], [1], offsets)
    weighted.weighted_sums_([out], [left], [right], weights, offsets, [False])
    each = gradients(left, right, offsets)
    assert relative_error(norms[0], each.square().sum((1, 2))) <= BOUND
    torch.testing.assert_close(out.double(), torch.einsum("b,bmn->mn", weights[0].double(), each), rtol=1e-5, atol=1e-4)
    assert found == [described] * 2


def test_a_nan_stays_in_its_unit():
    offsets = offsets_of((5, 60, 9))
    left, right = factor(74, 7, 0), factor(74, 9, 1)
    left[6, 3], right[64, 2] = float("inf"), float("nan")
    bits = torch.rand(7, 9) < 0.5
    ids = torch.randint(0, 4, (74,))
    for got in (
        gram.gram_norms([left], [right], [1], offsets)[0][0],
        direct.direct_norms(left, right, offsets, SQUARE)[0],
        direct.direct_norms(left, right, offsets, ABSOLUTE)[0],
        direct.direct_norms(left, right, offsets, MASKED_SQUARE, bits).sum(0),
        onehot.onehot_norms(ids, right, offsets, SQUARE)[0],
        onehot.onehot_norms(ids, right, offsets, ABSOLUTE)[0],
        onehot.onehot_norms(ids, right, offsets, MASKED_SQUARE, bits[:4]).sum(0),
        OPS["instance_norms"].on("cuda", torch.stack([right[0], right[64], right[70]]), SQUARE, None)[0],
        OPS["instance_norms"].on("cuda", torch.stack([right[0], right[64], right[70]]), MASKED_SQUARE, bits[0]).sum(0),
        cross.cross_inner(left, right, left, right, offsets, offsets),
        grouped.per_unit_group([left], [right], offsets)[1][0],
    ):
        assert got.isfinite().tolist() == [True, False, True]


def test_empty_batches_and_float64(as_on_a_gpu):
    """The functions registered for CUDA, with offsets on the host, and the way out of what no kernel takes."""
    offsets, nothing = offsets_of((3, 0, 6)), offsets_of(())
    left, right = factor(9, 5, 0), factor(9, 4, 1)
    made, norms = ops.per_unit_group([left.double()], [right], offsets)
    wide = ops.sqnorm(left.double(), right.double(), offsets, "auto")
    assert made[0].dtype == norms.dtype == wide.dtype == torch.float64
    assert ops.sqnorm(left[:0], right[:0], nothing, "gram").shape == (0,)
    assert ops.abs_sum(left[:0], right[:0], offsets_of((0, 0))).tolist() == [0.0, 0.0]
    assert ops.masked_sqnorm(left[:0], right[:0], nothing, torch.ones(5, 4, dtype=torch.bool)).shape == (2, 0)
    for empty in (torch.randn(0, 5), torch.randn(3, 0)):
        assert ops.instance_sqnorm(empty).tolist() == [0.0] * len(empty)
