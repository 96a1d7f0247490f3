"""The constants of `Rounding`: sums that lose what each term of them allows, and would exceed the bound without it."""

from __future__ import annotations

import pytest
import torch

from fastdp import _native, ops
from fastdp.ops import bounds
from fastdp.ops.bounds import EARLY, PADDING, ROW_PRODUCTS, PartialNorms, Roundings, round_down, upper_norms
from tests.cases import cases, pairs

UNIT = 2.0**-24
pytestmark = pytest.mark.skipif(
    ops.Rounding(torch.ones(1, 1)).arithmetic != "cpu",
    reason="the cases lose what the kernels' own order of sums loses",
)


def losing(tokens: int) -> torch.Tensor:
    """A column whose float32 sum keeps 1.0 and loses the rest: tokens one by one, and later ones 256 at a time."""
    rows = torch.full((tokens, 1), UNIT / EARLY)
    rows[:EARLY], rows[0] = UNIT, 1.0
    return rows


def lossy_row(width: int) -> torch.Tensor:
    """A row whose sum of squares keeps its first entries, one a lane, and loses the others."""
    row = torch.full((1, width), 2.0**-12)
    row[0, : 16 if _native.isa() == "avx512" else 8] = 1.0
    return row


@cases(
    *pairs(
        ("tokens, without", [(EARLY, "early"), (200 * EARLY, "early"), (200 * EARLY, "token")]),
        ("left", ["matrix", "ids"]),
    )
)
def test_the_entries_of_a_gradient_lose_what_their_bound_allows(tokens: int, without: str, left: str) -> None:
    rows, offsets = losing(tokens), torch.tensor([0, tokens])
    factor = torch.ones(tokens, 1) if left == "matrix" else torch.zeros(tokens, dtype=torch.int64)
    true, products = float(rows.double().sum()), float(ops.row_products(factor, rows, offsets)[0])
    lost = true - float(ops.sqnorm(factor, rows, offsets, "direct")) ** 0.5
    bound = ops.Rounding(factor, rows).entry()
    assert lost <= bound.gamma(tokens) * products
    assert lost > bound._replace(**{without: 0.0}).gamma(tokens) * products


def test_gram_matrices_lose_what_their_bound_allows() -> None:
    """The left row alone, both, and neither: each width counts."""
    offsets, short = torch.tensor([0, 1]), torch.ones(1, 1)
    for left, right in ((lossy_row(1024), short), (lossy_row(1024), lossy_row(1024))):
        true = float((left.double().norm() * right.double().norm()) ** 2)
        lost = true - float(ops.sqnorm(left, right, offsets, "gram"))
        bound = ops.Rounding(left, right).gram(left.shape[1], right.shape[1])
        least = ops.Rounding(left, right).gram(1, right.shape[1])
        assert least.gamma(1) * true < lost <= bound.gamma(1) * true


def test_a_sum_of_squares_loses_what_its_bound_allows() -> None:
    instance = lossy_row(1 << 16)[None]
    true = float(instance.double().square().sum())
    lost = true - float(ops.instance_sqnorm(instance))
    assert 0.5 * 160 * UNIT * true < lost <= ops.Rounding(instance).squares(1 << 16) * true


def test_rows_too_short_for_float32_count_as_if_they_were_longer() -> None:
    """Squares of these vanish in float32: another factor may be as long as they are short."""
    tiny, other, offsets = torch.full((1, 3), 2.0**-80), torch.ones(1, 1), torch.tensor([0, 1])
    least = 3**0.5 * PADDING
    for found in (ops.row_products(tiny, other, offsets)[0], ROW_PRODUCTS.reference(tiny, other, offsets, 2)[0]):
        assert least <= float(found) < 1.01 * least
    assert float(ops.row_products(tiny, other, offsets, order=1)[0]) >= 3 * PADDING


def test_products_cover_their_own_rounding() -> None:
    left = lossy_row(1 << 16)
    true = float(left.double().norm())
    assert float(ops.row_products(left, torch.ones(1, 1), torch.tensor([0, 1]))[0]) >= true


def test_roundings_add_up_and_the_larger_holds_both() -> None:
    one, two = Roundings(3.0, 1.0), Roundings(8.0, 1.0)
    assert one.plus(two) == Roundings(11.0, 2.0)
    assert one.larger(two) == two


@cases(*pairs(("order", [1, 2]), ("units", [1, 7])))
def test_bounds_on_processors_are_as_defined(order: int, units: int) -> None:
    """Parts with products and without, in both dtypes, some of them infinite or not a number, and counts beyond every bound."""
    generator = torch.Generator().manual_seed(order)
    parts = []
    for rows, dtype, counted in ((2, torch.float32, True), (3, torch.float64, False), (1, torch.float64, True)):
        powers = torch.rand(rows, units, generator=generator, dtype=torch.float64).to(dtype)
        products, tokens = 9 * torch.rand(2, rows, units, generator=generator, dtype=torch.float64)
        parts.append(PartialNorms(powers, products if counted else None, (1e3 * tokens).round() if counted else None))
    parts[0].powers[0, 0], parts[1].powers[1, -1] = -1.0, torch.inf
    if units > 1:
        parts[2].products[0, 1], parts[2].tokens[0, 2] = torch.nan, 2.0**26  # type: ignore[index]
        parts[2].products[0, 3] = 1e9  # type: ignore[index]
    errors = torch.rand(9, 6, 1, generator=generator, dtype=torch.float64) * 2.0**-24
    groups = torch.tensor([0, 1, 2, 0, 1, 1])
    found, defined = upper_norms(parts, groups, errors, 3, order), bounds.upper_norms_reference
    for own, truth in zip(found, defined(parts, groups, errors, 3, order)):
        torch.testing.assert_close(own, truth, rtol=1e-14, atol=0, equal_nan=True)
    assert found[2].any() == (units > 1)
    ratios = torch.cat(
        [0.4 / found[0], torch.tensor([[0.0, 1.0, 2.0**-41, 3.0, 0.1, torch.inf, torch.nan]])[:, :units]]
    )
    assert torch.equal(round_down(ratios), bounds.round_down_reference(ratios))
