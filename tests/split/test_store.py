"""What was appended is there after a kill, byte for byte, and what was not finished is gone."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp.split.store import RECORDS, ROWS, ExampleStore
from tests.test_files import small_files


def filled(folder, blocks, dtype=torch.float32):
    store = ExampleStore(folder, 3, dtype)
    examples = []
    for number, lengths in enumerate(blocks):
        rows = torch.randn(sum(lengths), 3).to(dtype)
        store.append(rows, lengths, f"digest {number}")
        examples += list(rows.split(lengths))
    return store, examples


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(max_examples=25)
def test_examples_come_back_as_they_were(tmp_path_factory, blocks, dtype, left, random):
    folder = tmp_path_factory.mktemp("store")
    store, examples = filled(folder, blocks, dtype)
    store.close()
    store = ExampleStore(folder, 3, dtype)
    assert store.count == len(examples)
    assert store.nbytes == sum(e.numel() for e in examples) * dtype.itemsize
    indices = [random.randrange(len(examples)) for _ in range(4)]
    rows, mask = store.batch(indices, left=left)
    for at, index in enumerate(indices):
        assert torch.equal(rows[at][mask[at].bool()], examples[index])
        assert (rows[at][~mask[at].bool()] == 0).all()
        assert mask[at].diff().ge(0).all() if left else mask[at].diff().le(0).all()
    first = indices[0]
    found, lengths = store.read(first, 3)
    assert torch.equal(found, torch.cat(examples[first : first + 3]))
    assert lengths == [len(e) for e in examples[first : first + 3]]
    store.close()


@pytest.mark.parametrize("damage", ["rows without their record", "half a record", "both"])
def test_an_unfinished_append_is_cut_off(tmp_path, damage):
    store, examples = filled(tmp_path, [[2, 1], [3]])
    store.close()
    if damage != "half a record":
        with open(tmp_path / ROWS, "ab") as file:
            file.write(b"x" * 17)
    if damage != "rows without their record":
        with open(tmp_path / RECORDS, "ab") as file:
            file.write(b'{"digest":"digest 2","first":3,"len')
    store = ExampleStore(tmp_path, 3, torch.float32)
    assert store.count == 3
    assert store.digest_of(2) == "digest 1"
    assert store.digest_of(3) is None
    more = torch.randn(2, 3)
    store.append(more, [2], "again")
    store.close()
    store = ExampleStore(tmp_path, 3, torch.float32)
    assert torch.equal(store.read(0, 4)[0], torch.cat([*examples, more]))
    store.close()


def test_refusals(tmp_path):
    filled(tmp_path, [[2]])[0].close()
    for width, dtype in ((4, torch.float32), (3, torch.bfloat16)):
        with pytest.raises(ValueError, match="another width or dtype"):
            ExampleStore(tmp_path, width, dtype)
    with open(tmp_path / RECORDS, "ab") as file:
        file.write(b'{"first":7,"lengths":[1],"digest":""}\n')
    with pytest.raises(ValueError, match="a record of example 7 at 1: it was damaged"):
        ExampleStore(tmp_path, 3, torch.float32)
    filled(tmp_path / "other", [[2]])[0].close()
    (tmp_path / "other" / ROWS).write_bytes(b"short")
    with pytest.raises(ValueError, match="shorter than its records say: it was damaged"):
        ExampleStore(tmp_path / "other", 3, torch.float32)


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    """Rows fit, their record does not: neither is left, and the same append works later."""
    store = ExampleStore(tmp_path, 1, torch.float16)
    store.append(torch.ones(2, 1, dtype=torch.float16), [2], "first")
    before = {name: (tmp_path / name).read_bytes() for name in ("rows.bin", "rows.jsonl")}
    for _ in range(2):
        with small_files(len(before["rows.jsonl"]) + 5), pytest.raises(OSError, match="File too large"):
            store.append(torch.zeros(1, 1, dtype=torch.float16), [1], "second")
        assert before == {name: (tmp_path / name).read_bytes() for name in before}
    store.append(torch.zeros(1, 1, dtype=torch.float16), [1], "second")
    store.close()
    again = ExampleStore(tmp_path, 1, torch.float16)
    assert (again.count, again.digest_of(1)) == (2, "second")
    again.close()
