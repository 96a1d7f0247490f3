"""Calls whose rows are no first axis are encoded with rows first, and decoded as they were."""

import dataclasses

import pytest
import torch

from fastdp.calls.batches import RowLists, as_long_as, leaves, row_of, take_rows
from fastdp.calls.collation import Collation
from fastdp.calls.marks import Marks


class Batch:
    """A collation of some examples by torch's own collator, or with time first."""

    def __init__(self, examples, collate=torch.stack):
        self.made = collate(examples)
        self.source = Collation.of(examples, lambda rows: [collate(rows)], range(len(examples)), [self.made])


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


STATE = torch.zeros(1, 2, 4)


@pytest.mark.parametrize(
    ("rows", "given", "found"),
    [
        # Hidden states of two rows are no list of one entry a row.
        (2, (torch.zeros(2, 3), (STATE, STATE)), [(2, 3), (2, 1, 4), (2, 1, 4)]),
        # Positions of all rows stay where they are.
        (5, (torch.zeros(5, 7), torch.arange(5)[None]), [(5, 7), (1, 5)]),
    ],
)
def test_what_only_looks_like_rows(rows, given, found):
    assert shapes(RowLists().encode((given, {}), rows)) == found


@pytest.mark.parametrize("given", [lambda made: made.t(), lambda made: list(made)], ids=["time first", "a list"])
def test_other_layouts_are_not_several_rows_of_an_example(given):
    batch, lists = Batch(list(torch.rand(5, 10))), RowLists()
    assert shapes(lists.encode(((given(batch.made),), {}), 5, batch.source))[0][0] == 5


@pytest.mark.parametrize(("rows", "channels"), [(3, 3), (1, 1)])
def test_images_in_a_list_are_entries_where_there_are_as_many_as_channels(rows, channels):
    batch = Batch([torch.rand(channels, 4, 5) for _ in range(rows)], list)
    lists = RowLists()
    assert shapes(lists.encode(((batch.made,), {}), rows, batch.source)) == [(rows,)]
    # What the loop made of the batch is told by what was seen there.
    assert shapes(lists.encode((([t + 1 for t in batch.made],), {}), rows, batch.source)) == [(rows,)]
    # A tuple of as many layers as rows is none of entries.
    layers = Batch(list(torch.rand(rows, 4)), lambda examples: [torch.stack(examples)] * rows)
    assert shapes(RowLists().encode(((layers.made,), {}), rows, layers.source)) == [(rows, 4)] * rows


def test_an_axis_is_the_one_where_rows_were_seen_alone():
    lists = RowLists()
    assert shapes(lists.encode(((torch.zeros(6, 5),), {}), 5)) == [(5, 6)]
    # As many tokens as rows, later on.
    square = torch.arange(25).view(5, 5)
    assert torch.equal(lists.encode(((square,), {}), 5)[0][0], square.t())
    assert shapes(lists.encode(((torch.zeros(6, 1),), {}), 1)) == [(1, 6)]


def test_of_a_square_first_batch_one_example_tells():
    examples = list(torch.arange(25).view(5, 5))
    for collate, second in ((lambda rows: torch.stack(rows, 1), True), (torch.stack, False)):
        batch = Batch(examples, collate)
        found = RowLists().encode(((batch.made,), {}), 5, batch.source)[0][0]
        assert torch.equal(found, batch.made.t() if second else batch.made)


def test_the_loaders_own_entries_tell_which_axis_a_loop_has_turned():
    """A first batch of as many rows as tokens."""
    batch = Batch(list(torch.arange(30).view(5, 6)))
    inputs, padding = batch.made[:, :-1].t().contiguous(), torch.ones(5, 5)
    lists = RowLists()
    found = lists.encode(((inputs, padding), {}), 5, batch.source)
    assert torch.equal(found[0][0], batch.made[:, :-1])
    assert lists.decode(found)[0][0].tolist() == inputs.tolist()
    # The padding mask is alike either way: cut in two rows, it must still have the inputs' sizes.
    cut = take_rows(found, torch.tensor([0, 1]), as_long_as(found, 5))
    assert shapes(lists.decode(cut)) == [(5, 2), (5, 2)]
    plain = RowLists().encode(((batch.made[:, 1:] / 7,), {}), 5, batch.source)
    assert torch.equal(plain[0][0], batch.made[:, 1:] / 7)


def test_a_table_that_a_loop_had_before_its_batch_has_no_rows():
    """As many classes as rows, in either order of its axes."""
    batch, table = Batch(list(torch.rand(5, 3))), torch.rand(5, 4)
    earlier = [table, written := table.clone(), turned := table.t().contiguous()]
    batch.source = dataclasses.replace(batch.source, earlier=Marks((t, t._version) for t in earlier))
    written[0] = batch.made[0, 0]
    lists, call = RowLists(), ((batch.made, table, turned, written), {})
    found = lists.encode(call, 5, batch.source)
    assert as_long_as(found, 5) == {(0, 0), (0, 3)}
    cut = lists.decode(take_rows(found, torch.tensor([0, 1]), as_long_as(found, 5)))
    assert shapes(cut) == [(2, 3), (5, 4), (4, 5), (2, 4)]
    assert all(torch.equal(a, b) for a, b in zip(lists.decode(found)[0], call[0]))


def test_states_of_as_many_layers_as_rows_have_rows_second():
    batch = Batch([torch.arange(3), torch.arange(3)])
    call = ((batch.made, torch.zeros(2, 2, 4)), {})
    lists = RowLists()
    found = take_rows(lists.encode(call, 2, batch.source), torch.tensor([0]), [(0, 0), (0, 1)])
    assert shapes(lists.decode(found)) == [(1, 3), (2, 1, 4)]


def _several_rows(batch, order):
    """Three rows of each example: one after the other as `torch.cat` leaves them, or side by side."""
    stacked = torch.stack([batch.made, batch.made + 0.5, -batch.made])
    return (stacked if order == "cat" else stacked.transpose(0, 1)).flatten(0, 1)


@pytest.mark.parametrize("order", ["cat", "side by side"])
@pytest.mark.parametrize("features", [4, 5])
def test_several_rows_of_an_example_are_taken_together(order, features):
    """Also where an example has as many features as the batch rows."""
    batch = Batch(list(torch.rand(5, features)))
    lists, given = RowLists(), _several_rows(batch, order)
    found = lists.encode(((given,), {"mask": given > 0}), 5, batch.source)
    assert shapes(found) == [(5, 3, features)] * 2
    assert torch.equal(found[0][0][:, 2], -batch.made)
    # The model takes the rows of an example side by side; its outputs go back in the loop's order.
    decoded = lists.decode(found)[0][0]
    assert torch.equal(decoded[3:6], found[0][0][1])
    assert torch.equal(lists.as_given(decoded), given)
    cut = lists.decode(take_rows(found, torch.tensor([1]), as_long_as(found, 5)))
    assert torch.equal(cut[0][0], found[0][0][1])
    # One example is no different; another number of rows is no batch of these.
    assert shapes(lists.encode(((given[:3],), {}), 1, batch.source)) == [(1, 3, features)]
    lists.encode(((given[:10],), {}), 5, batch.source)
    assert not lists


def test_a_mask_tells_nothing_of_several_rows_of_an_example():
    """Two texts, time first, whose four steps could be two rows each."""
    ids, mask = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]]), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    source = Collation.of([0, 1], list, range(2), {"ids": ids, "mask": mask})
    lists = RowLists()
    assert shapes(lists.encode(((ids.t(), mask.t()), {}), 2, source)) == [(2, 4), (2, 4)]
    assert not lists


def test_images_as_high_as_the_batch_is_large_are_entries_of_a_list():
    images = [torch.rand(1, 3, width) for width in (3, 5, 4)]
    lists = RowLists()
    encoded = lists.encode(((tuple(images),), {}), 3)
    assert shapes(encoded) == [(3,)]
    assert shapes(lists.decode(encoded)) == [(1, 3, 3), (1, 3, 5), (1, 3, 4)]


def test_a_row_is_found_again_in_its_batch():
    """By a mask of truth values, and of rows with equal inputs the expected one: their labels may differ."""
    padded = (torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]]), torch.tensor([[True] * 4, [True, True, False, False]]))
    assert row_of((padded, {}), 2, ((torch.tensor([[5, 6]]), torch.tensor([[True, True]])), {})) == 1
    whole, alone = torch.tensor([[1, 2], [3, 4], [1, 2]]), torch.tensor([[1, 2]])
    assert [row_of((whole,), 3, (alone,), row) for row in range(3)] == [0, 0, 2]


def test_a_mask_of_as_many_tokens_as_rows_lies_as_its_ids():
    ids = torch.tensor([[5, 6, 7], [5, 0, 8], [4, 0, 0]])
    batch = Batch(list(ids), lambda rows: torch.stack(rows, 1))
    call, lists = ((batch.made, (batch.made == 0).t()), {}), RowLists()
    one = lists.decode(take_rows(lists.encode(call, 3, batch.source), torch.tensor([1]), [(0, 0), (0, 1)]))
    assert torch.equal(one[0][0], ids[1:2].t())
    assert torch.equal(one[0][1], ids[1:2] == 0)


def test_an_example_as_long_as_the_batch_is_its_own_row_in_a_list():
    """A collator may hand out the data set's own tensors, which were there before the batch."""
    examples = [torch.arange(2), torch.arange(5)]
    collation = Collation.of(examples, list, [0, 1], list(examples))
    source, lists = dataclasses.replace(collation, earlier=Marks((t, 0) for t in examples)), RowLists()
    assert shapes(lists.decode(lists.encode(((examples,), {}), 2, source))) == [(2,), (5,)]
