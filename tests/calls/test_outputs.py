"""Outputs are handled with rows first, and returned as the model made them."""

import pytest
import torch

from fastdp.calls.batches import map_tensors
from fastdp.calls.outputs import OutputRows, SharedOutput
from fastdp.engine.uses.rows import BatchAxis

ROWS, TOKENS, WIDTH = 3, 4, 5


@pytest.mark.parametrize(
    ("made", "fold"),
    [
        (lambda x: x, BatchAxis()),
        (lambda x: x.transpose(0, 1), BatchAxis(1, None)),
        (lambda x: x.flatten(0, 1), BatchAxis()),
        (lambda x: x.transpose(0, 1).flatten(0, 1), BatchAxis(0, inner=True)),
        (lambda x: x.unflatten(1, (2, 2)).movedim(1, 0).flatten(0, 2), BatchAxis(0, inner=2)),
        (lambda x: x.permute(1, 2, 0), BatchAxis(2, None)),
        (lambda x: x.permute(2, 0, 1).flatten(1, 2), BatchAxis(1)),
    ],
    ids=[
        "rows first",
        "time first",
        "flat",
        "flat, time first",
        "flat, second of three",
        "rows last",
        "flat second axis",
    ],
)
def test_rows_come_first_and_go_back(made, fold):
    x = torch.randn(ROWS, TOKENS, WIDTH)
    given = {"logits": made(x), "size": 3}
    rows = OutputRows({("logits",): (fold, given["logits"].dim())})
    first = rows.first(given, ROWS)["logits"]
    assert first.shape[0] == ROWS
    assert all(torch.equal(first[row].flatten().sort()[0], x[row].flatten().sort()[0]) for row in range(ROWS))
    assert torch.equal(rows.as_returned({"logits": first, "size": 3})["logits"], given["logits"])


def test_a_distribution_holds_tensors():
    law = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(ROWS, WIDTH), torch.ones(WIDTH)), 1)
    made = map_tensors({"law": law}, lambda t: t + 1)["law"]
    assert made.base_dist.loc.eq(1).all()
    assert law.base_dist.loc.eq(0).all()
    assert made.log_prob(made.sample()).shape == (ROWS,)


def test_squeeze_may_have_left_out_the_axis_of_one_row():
    rows = OutputRows({(): (BatchAxis(), 2)})
    assert rows.first(torch.zeros(WIDTH), 1).shape == (1, WIDTH)


def test_an_output_without_rows_is_looked_at_and_not_differentiated():
    scale = torch.ones(2, requires_grad=True)
    rows = OutputRows({(0,): (BatchAxis(), 2)}, without={(1,)})
    logits, given = rows.first((torch.zeros(ROWS, 2), 2 * scale), ROWS)
    assert SharedOutput.made(given)
    assert given.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="row for each example"):
        (logits * given).sum().backward()
    assert scale.grad is None
