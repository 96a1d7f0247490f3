"""Each term of a unit's bound is needed: cases that lose as much as it allows, and are beyond the bound without it.

A bound must reach the true norm and, on top, what rounding may add where the sum is made.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from fastdp import ops
from fastdp.engine.bounds import UpperNorms, gammas
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.norms import NormSink
from fastdp.engine.clip.policy import Policy
from fastdp.engine.uses.factors import Factors
from fastdp.engine.uses.layout import Ticket
from tests.cases import cases, pairs
from tests.ops.test_rounding import UNIT, losing, lossy_row, pytestmark  # noqa: F401

TOKENS = 256


def column(values: torch.Tensor, width: int) -> torch.Tensor:
    """Values [tokens, 1] as the first column of ``width``."""
    return nn.functional.pad(values, (0, width - values.shape[1]))


def upper(
    shape: tuple[int, int],
    *uses: Factors | torch.Tensor,
    keep: bool = True,
    table: bool = False,
    mask: torch.Tensor | None = None,
) -> UpperNorms:
    """The bound of one unit whose parameter is captured so: factors, or a whole gradient."""
    parameter, masked = nn.Parameter(torch.zeros(shape)), mask is not None
    policy = Policy(
        (1.0,) * (1 + masked), (0.0,) * (1 + masked), {"w": (0, 1) if masked else 0}, {"w": mask} if masked else {}
    )
    accumulator = Accumulator({"w": parameter}, policy)
    layout = Ticket(torch.zeros(1, dtype=torch.int64), torch.ones(1), True).layout(torch.device("cpu"))
    accumulator.tables = frozenset("w" if table else "")
    sink = NormSink(accumulator, layout, {"w": len(uses)}, keep=keep)
    for use in uses:
        if isinstance(use, Factors):
            sink.matrix(parameter, use, layout)
        else:
            sink.vector(parameter, use, layout)
    return sink.finish()


def needed(*uses: Factors | torch.Tensor) -> float:
    """The true norm of the sum of uses, and what adding them may round it up by."""
    total, apart = 0.0, 0.0
    for use in uses:
        if not isinstance(use, Factors):
            total = total + use[0].double()
            continue
        left, right = use.left, use.right
        wide = nn.functional.one_hot(left, 2).double() if use.one_hot else left.double()
        tokens = torch.tensor([float(sum(len(u.right) for u in uses if isinstance(u, Factors)))]).double()
        total = total + wide.T @ right.double()
        products = wide.norm(dim=1) @ right.double().norm(dim=1)
        apart += float(gammas([ops.Rounding(left, right).added()], tokens)) * float(products)
    return float(torch.as_tensor(total).norm()) + apart


@cases(*pairs(("width", [8, 96]), ("keep", [True, False])))
def test_the_entries_of_a_gradient_that_is_squared_directly(width: int, keep: bool) -> None:
    tokens = 8 * TOKENS if width > 64 else TOKENS
    use = Factors(column(torch.ones(tokens, 1), width), column(losing(tokens), width))
    assert float(upper((width, width), use, keep=keep).norms) >= needed(use)


def test_the_entries_of_a_masked_gradient() -> None:
    use = Factors(column(torch.ones(TOKENS, 1), 8), column(losing(TOKENS), 8))
    inside = upper((8, 8), use, mask=torch.ones(8, 8, dtype=torch.bool).tril()).norms[0]
    assert float(inside) >= needed(use)


def test_the_inner_products_of_a_gram_matrix() -> None:
    use = Factors(lossy_row(1024), lossy_row(1024))
    assert float(upper((1024, 1024), use).norms) >= needed(use)


def test_the_squares_of_a_whole_gradient() -> None:
    whole = lossy_row(1 << 16).view(1, 256, 256)
    assert float(upper((256, 256), whole).measured.sqrt()) < float(whole.double().norm())
    assert float(upper((256, 256), whole).norms) >= float(whole.double().norm())


def test_entries_whose_squares_vanish() -> None:
    whole = torch.full((1, 8, 8), 2.0**-76)
    found = upper((8, 8), whole)
    assert float(found.measured) == 0
    assert float(found.norms) >= float(whole.double().norm())


def test_the_rows_of_a_table_that_is_a_head_as_well() -> None:
    """Their sums are squared as they come, without the bound of a gradient's entries."""
    ids, head = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(1, 2)
    head[0, 1] = 2.0**-20
    table = Factors(ids, column(losing(TOKENS), 8)), Factors(head, column(torch.full((1, 1), 2.0**-20), 8))
    assert float(upper((2, 8), *table, table=True).norms) >= needed(*table)


def test_a_table_and_a_head_that_cancel_are_put_together_and_added_again() -> None:
    ids, head = torch.zeros(TOKENS, dtype=torch.int64), -torch.eye(2)[:1]
    table = Factors(ids, column(losing(TOKENS), 8)), Factors(head, column(torch.ones(1, 1), 8))
    true = (TOKENS - 1) * UNIT
    found = upper((2, 8), *table, table=True)
    assert math.sqrt(float(found.measured)) < 1e-3
    assert needed(*table) > true
    assert float(found.norms) >= needed(*table)


def test_what_is_measured_whole_and_added_as_factors() -> None:
    """In the second pass the factors do not cancel with the instance to the last bit."""
    use = Factors(column(torch.ones(TOKENS, 1), 8), column(losing(TOKENS), 8))
    whole = -(use.left.double().T @ use.right.double()).float()[None]
    assert needed(use, whole) > 100 * UNIT
    assert float(upper((8, 8), whole, use, keep=False).norms) >= needed(use, whole)
