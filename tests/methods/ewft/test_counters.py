"""What was told is counted through a save and a load: neither may forget a query or a record."""

import copy
import math

import pytest
import torch

from fastdp.methods import ewft
from tests.engine.models import batch, build
from tests.methods.ewft.test_pure import CODEBOOK, ROWS, TOKENS, attach, numbered


def ask(private, rows=ROWS):
    """Queries, each a release of its own."""
    model = private.blocks.model.eval()
    with torch.no_grad():
        model(**batch("bert", rows=rows, tokens=TOKENS))


def test_queries_are_counted_by_rows_and_never_rolled_back():
    private = attach(build("bert"))
    early = copy.deepcopy(private.state_dict())
    ask(private)
    ask(private, rows=1)
    assert private.inference_releases == ROWS + 1
    private.load_state_dict(early)
    assert private.inference_releases == ROWS + 1
    late = copy.deepcopy(private.state_dict())
    again = attach(build("bert"), learned=False)
    again.load_state_dict(late)
    assert again.inference_releases == ROWS + 1
    ask(again)
    assert again.inference_releases == 2 * ROWS + 1
    assert any(f"; {2 * ROWS + 1} were made" in note for note in again.card()["notes"])


def test_records_that_were_told_are_kept_as_told():
    model = build("bert").train()
    private = attach(model)
    model(**numbered())
    again = attach(build("bert").train(), learned=False)
    again.load_state_dict(copy.deepcopy(private.state_dict()))
    assert again.card()["released_records"] == ROWS
    assert not again.untouched
    with pytest.raises(ValueError, match="of 4 records, not 5"):
        attach(build("bert"), learned=False, dataset_size=5).load_state_dict(private.state_dict())


def test_every_query_costs_as_much_again():
    settings = {"layer": 1, "sequence_length": TOKENS, "dataset_size": ROWS}
    private = ewft.PureSettings(mechanism=CODEBOOK, **settings).open(build("bert"))
    one = CODEBOOK.epsilon
    assert private.inference_epsilon() == one
    assert private.inference_epsilon(3) == 3 * one
    assert private.epsilon() == 0
    assert attach(build("bert")).inference_epsilon(3) == math.inf
