"""Calls whose rows are no first axis are encoded with rows first, and decoded as they were."""

from types import SimpleNamespace

import torch

from fastdp.calls.batches import RowLists, leaves


def shapes(call):
    return [tuple(t.shape) for _, t in leaves(call)]


def test_tensors_with_rows_second_come_first_and_go_back():
    ids, hidden = torch.arange(30).view(6, 5), torch.randn(2, 5, 4)
    lists, call = RowLists(), ((ids, (hidden, hidden + 1)), {"mask": torch.ones(5, 6)})
    encoded = lists.encode(call, 5)
    assert shapes(encoded) == [(5, 6), (5, 2, 4), (5, 2, 4), (5, 6)]
    assert not lists
    decoded = lists.decode(encoded)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(leaves(decoded), leaves(call)))


def test_hidden_states_of_two_rows_are_no_list_of_one_entry_a_row():
    state = torch.zeros(1, 2, 4)
    encoded = RowLists().encode(((torch.zeros(2, 3), (state, state)), {}), 2)
    assert shapes(encoded) == [(2, 3), (2, 1, 4), (2, 1, 4)]


def test_an_axis_is_the_one_where_rows_were_seen_alone():
    lists = RowLists()
    assert shapes(lists.encode(((torch.zeros(6, 5),), {}), 5)) == [(5, 6)]
    # As many tokens as rows, later on.
    square = torch.arange(25).view(5, 5)
    assert torch.equal(lists.encode(((square,), {}), 5)[0][0], square.t())
    assert shapes(lists.encode(((torch.zeros(6, 1),), {}), 1)) == [(1, 6)]


def test_of_a_square_first_batch_one_example_tells():
    square, call = torch.arange(25).view(5, 5), lambda t: ((t,), {})
    for single, second in ((torch.zeros(5, 1), True), (torch.zeros(1, 5), False)):
        source = SimpleNamespace(items=lambda rows: rows, collated=lambda items, single=single: [single])
        found = RowLists().encode(call(square), 5, source)[0][0]
        assert torch.equal(found, square.t() if second else square)


def test_positions_of_all_rows_stay_where_they_are():
    positions = torch.arange(5)[None]
    assert shapes(RowLists().encode(((torch.zeros(5, 7), positions), {}), 5)) == [(5, 7), (1, 5)]
