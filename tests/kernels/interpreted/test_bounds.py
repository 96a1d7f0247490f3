"""What rounding is measured by, in Triton, and sums of units that share a block, against float64."""

import pytest
import torch
from fastdp.kernels import bounds, gram, sums

from fastdp import ops
from fastdp.ops.bounds import PADDING
from tests.cases import pairs
from tests.ops.uses import DTYPES, factor, gradients, offsets_of, relative_error

RAGGED = (7, 0, 33, 20)


def products_of(left, right, offsets, order):
    sizes = torch.linalg.vector_norm(right.double(), ord=order, dim=1)
    if left.dim() == 2:
        sizes = sizes * torch.linalg.vector_norm(left.double(), ord=order, dim=1)
    edges = offsets.tolist()
    return torch.stack([sizes[a:b].sum() for a, b in zip(edges, edges[1:])])


@pytest.mark.parametrize(*pairs(("strided", [False, True]), ("dtype", DTYPES)))
def test_token_counts_are_of_the_tokens_that_add_anything(dtype, strided):
    """Rows that begin with zeros are not zero, and padding counts on neither side."""
    offsets = offsets_of(RAGGED)
    lefts = [factor(60, m, m, dtype, "strided" if strided else "plain").clone() for m in (33, 300)]
    rights = [factor(60, 140, 1), factor(60, 17, 2, dtype)]
    empty = (lefts[0][5:9], lefts[1][:20], lefts[0][30:, :32], lefts[1][40:, :299], rights[0][50:], rights[1][45:47])
    for zeros in empty:
        zeros.zero_()
    if strided:
        lefts, rights = ([x.T.contiguous().T for x in side] for side in (lefts, rights))
    truth = ops.token_counts(lefts, rights, offsets)
    assert torch.equal(bounds.token_counts(lefts, rights, offsets), truth)
    for at, (left, right) in enumerate(zip(lefts, rights)):
        assert torch.equal(bounds.row_products(left, right, offsets, 2)[1], truth[at])
    ids = torch.randint(0, 5, (60,))
    (of_ids,) = ops.token_counts([ids], rights[1:], offsets)
    assert torch.equal(bounds.row_products(ids, rights[1], offsets, 1)[1], of_ids)
    assert not bounds.token_counts([lefts[0][:0]], [rights[0][:0]], 0 * offsets).any()


def test_rows_too_short_for_float32_count_as_if_they_were_longer():
    tiny, other, offsets = torch.full((1, 3), 2.0**-80), torch.ones(1, 1), offsets_of((1,))
    least = 3**0.5 * PADDING
    assert least <= float(bounds.row_products(tiny, other, offsets, 2)[0]) < 1.01 * least
    assert float(bounds.row_products(tiny, other, offsets, 1)[0]) >= 3 * PADDING


def test_gram_norms_come_with_their_products():
    """Groups of several dtypes and widths, each row measured by the diagonals of its Gram matrices."""
    offsets = offsets_of(RAGGED)
    wide = factor(60, 40, 1, torch.bfloat16)
    groups = [([factor(60, 17, 0), wide], factor(60, 33, 2)), ([factor(60, 70, 3)], factor(60, 5, 4))]
    for side, programs in ((16, 3), (None, None)):
        squares, products = gram.gram_norms(
            [left for lefts, _ in groups for left in lefts],
            [right for _, right in groups],
            [2, 1],
            offsets,
            b_t=side,
            programs=programs,
        )
        pairs = [(left, right) for lefts, right in groups for left in lefts]
        for (left, right), square, product in zip(pairs, squares, products):
            assert relative_error(square, gradients(left, right, offsets).square().sum((1, 2))) <= 1e-5
            truth = products_of(left, right, offsets, 2)
            assert relative_error(product, truth) <= 1e-4
            assert bool((product * (1 + 2.0**-10) >= truth).all())


def test_every_pair_of_tiles_is_a_job():
    """The triangle of each unit, and nothing else."""
    offsets = offsets_of((70, 0, 1, 33))
    for b_t in (16, 32, 128):
        table, most = gram.pairs_of(offsets, 104, b_t)
        pairs = table[5:].view(3, most)[:, : int(table[4])].T.tolist()
        wanted = []
        for start, end in ((0, 70), (70, 70), (70, 71), (71, 104)):
            rows = range(start, end, b_t)
            wanted += [[row, column, end] for row in rows for column in range(start, row + 1, b_t)]
        assert pairs == wanted


def test_only_chosen_units_are_measured_again():
    """Of matrices of several sizes and dtypes, over several tiles."""
    offsets, chosen = (
        offsets_of(RAGGED),
        torch.tensor([[True, True, False, True], [False] * 4, [False, True, True, True]]),
    )
    dtypes = [torch.float32, torch.bfloat16, torch.bfloat16]
    lefts = [factor(60, m, m, dtype) for m, dtype in zip((33, 8, 129), dtypes)]
    rights = [factor(60, n, n, dtype) for n, dtype in zip((70, 16, 300), dtypes)]
    truth = [gradients(left, right, offsets).square().sum((1, 2)) for left, right in zip(lefts, rights)]
    assert relative_error(bounds.chosen_sqnorm(lefts, rights, offsets, chosen), torch.stack(truth) * chosen) <= 1e-5
    nothing = bounds.chosen_sqnorm([x[:0] for x in lefts], [x[:0] for x in rights], 0 * offsets, chosen)
    assert not nothing.any()


@pytest.mark.parametrize(*pairs(("masked", [False, True]), ("dtype", DTYPES)))
def test_what_a_unit_adds_is_not_rounded_to_16_bits(dtype, masked):
    """Each unit's own part is as long as its weight says, however much larger its neighbours' weights are."""
    offsets = offsets_of(RAGGED)
    left, right = factor(60, 40, 0, dtype), factor(60, 50, 1, dtype)
    scales = torch.tensor([1.0, 0.5, 3e-7, 0.37])
    mask = torch.rand(40, 50, generator=torch.Generator().manual_seed(0)) < 0.4
    products = products_of(left, right, offsets, 2)
    for unit in (0, 2, 3):
        with_others, without = torch.zeros(40, 50), torch.zeros(40, 50)
        rest = torch.where(torch.arange(4) == unit, 0.0, scales)
        for out, weights in ((with_others, scales), (without, rest)):
            options = (weights, mask) if masked else (None, None)
            sums.weighted_sum_(out, left, right, weights, *options, offsets)
        expected = gradients(left, right, offsets)[unit] * float(scales[unit])
        gap = float(((with_others.double() - without.double()) - expected).norm())
        # Of the others' parts the last bit may differ; of its own 16-bit rounding would leave 1e-3.
        others = float((scales.double() * products).sum() - scales[unit] * products[unit])
        assert gap <= 2e-6 * float(scales[unit] * products[unit]) + 2e-7 * others
