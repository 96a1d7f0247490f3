"""Definitions where no kernel is compared with them: rows that are not finite, grids of exact sums, other arithmetic."""

from __future__ import annotations

import math

import torch

from fastdp import ops
from fastdp.ops.bounds import shared_token_counts
from fastdp.ops.grid import exact_spacing
from fastdp.ops.table import OPS
from tests.cases import cases

UNIT = 2.0**-24


@cases("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_clipped_to_nothing(bad: float) -> None:
    rows = torch.ones(3, 4)
    rows[1, 2] = bad
    position = ops.NoiseStream.unsafe_reproducible(0).take()
    for run in (OPS["clip_noise"].reference, OPS["clip_noise"]):
        clipped, norms = run(rows, 1.0, 0.0, position, False)
        assert torch.equal(clipped[1], torch.zeros(4))
        assert bool((clipped[[0, 2]].norm(dim=1) <= 1).all())
        assert not math.isfinite(float(norms[1]))
        position = ops.NoiseStream.unsafe_reproducible(0).take()


@cases("count, largest", [(1, 1.0), (3, 5.0), (1000, 0.3), (2**20, 7.0), (5, 2.0**-30)])
def test_sums_on_a_grid_are_exact_and_the_grid_is_the_finest(count: int, largest: float) -> None:
    spacing = exact_spacing(count, largest)
    assert math.frexp(spacing)[0] == 0.5
    assert count * largest / spacing <= 2**24
    assert count * largest / (spacing / 4) > 2**24
    # The sum before the last, and the last and least summand: float32 holds both.
    most = math.floor(count * largest / spacing) * spacing
    assert float(torch.tensor(most) - torch.tensor(spacing)) == most - spacing


@cases("bad", [math.nan, math.inf])
def test_a_zero_that_meets_what_is_not_finite_counts(bad: float) -> None:
    """Its product is NaN, so that the token adds to a gradient."""
    left, right = torch.tensor([[1.0], [0.0], [0.0], [bad]]), torch.tensor([[1.0], [bad], [1.0], [0.0]])
    offsets = torch.tensor([0, 1, 2, 3, 4])
    for found in (ops.token_counts([left], [right], offsets)[0], shared_token_counts([left], right, offsets)):
        assert found.tolist() == [1, 1, 0, 1]
    # Of uses that read the same input, one may have a gradient where another has none.
    assert shared_token_counts([left, torch.ones(4, 1)], right, offsets).tolist() == [1, 1, 1, 1]


def test_arithmetic_in_an_unknown_order_may_lose_a_rounding_at_each_token_and_column() -> None:
    """What torch adds up in float32 elsewhere: a sum that begins with 1.0 and goes on with 2^-24 loses all of these."""
    rounding = ops.Rounding(torch.empty(1, 1, device="meta"))
    assert rounding.arithmetic == "torch"
    for tokens in (1, 300, 10_000):
        assert rounding.entry().gamma(tokens) >= (tokens - 1) * UNIT
        assert rounding.added().gamma(tokens) >= (tokens - 1) * UNIT
        assert rounding.gram(tokens, 1).gamma(1) >= (tokens - 1) * UNIT
