"""Messages survive the wire; whatever else arrives is refused, before anything of its size is allocated."""

import json
import struct
import tracemalloc

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp.split.wire import (
    CHUNK_BYTES,
    FLOAT_TYPES,
    MAGIC,
    MAX_HEADER,
    PREAMBLE,
    PROTOCOL_VERSION,
    MessageRejected,
    Outgoing,
    TensorSpec,
    receive,
)
from tests.cases import cases

SPECS = {"rows": TensorSpec(FLOAT_TYPES, ((1, 1 << 30), 4)), "lengths": TensorSpec((torch.int64,), ((1, 9),))}


def expect(op, fields):
    return SPECS if op == "put" else {}


def message(rows=5, dtype=torch.float32):
    return Outgoing.of("put", {"first": 3}, {"rows": torch.randn(rows, 4).to(dtype), "lengths": torch.tensor([rows])})


def joined(chunks, most=1 << 30):
    return receive(iter(chunks), expect, most)


@given(st.integers(1, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=25)
def test_a_message_arrives_as_it_was_sent(rows, dtype):
    sent = message(rows, dtype)
    found = joined(sent)
    assert (found.op, found.fields) == ("put", {"first": 3})
    again = joined(sent)
    assert found.digest == again.digest
    assert found.tensors["rows"].dtype == dtype
    assert torch.equal(found.tensors["rows"], again.tensors["rows"])
    assert found.tensors["lengths"].tolist() == [rows]
    assert found.digest != joined(message(rows, dtype)).digest


def test_large_messages_travel_in_chunks_of_a_mebibyte(tmp_path):
    sent = message(200_000)
    chunks = list(sent)
    assert [len(chunk) for chunk in chunks[:-1]] == [CHUNK_BYTES] * 3
    assert 0 < len(chunks[-1]) <= CHUNK_BYTES
    whole = joined(chunks).tensors["rows"]
    (tmp_path / "payload").write_bytes(sent.payload)
    from_file = Outgoing("put", {"first": 3}, tmp_path / "payload")
    assert list(from_file) == chunks
    with open(tmp_path / "copy", "wb") as file:
        receive(iter(from_file), lambda op, fields: None, 1 << 30, file)
    assert (tmp_path / "copy").read_bytes() == sent.payload
    assert whole.shape == (200_000, 4)


@given(st.data())
@settings(max_examples=60)
def test_chunks_cut_lost_doubled_or_added_are_refused(data):
    chunks = list(message(120_000))
    kind = data.draw(st.sampled_from(["cut", "lose", "double", "add", "none"]))
    at = data.draw(st.integers(0, len(chunks) - 1))
    if kind == "cut":
        chunks[at] = chunks[at][: data.draw(st.integers(0, len(chunks[at]) - 1))]
    elif kind == "lose":
        del chunks[at]
    elif kind == "double":
        chunks.insert(at, chunks[at])
    elif kind == "add":
        chunks.append(b"x")
    else:
        chunks = []
    with pytest.raises(MessageRejected):
        joined(chunks)


def raw(header, payload=b"", version=PROTOCOL_VERSION, magic=MAGIC, says=None):
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = PREAMBLE.pack(magic, version, len(head), len(payload) if says is None else says) + head + payload
    return [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]


def tensors(**changes):
    entries = {
        "lengths": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        "rows": {"dtype": "F32", "shape": [2, 4], "data_offsets": [8, 40]},
    }
    for name, change in changes.items():
        entries[name] = entries.get(name, {}) | change if isinstance(change, dict) else change
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + bytes(40)


PUT = {"op": "put", "fields": {}}


def test_the_hand_made_message_is_good():
    """So that the refusals below are for what each of them changes."""
    assert joined(raw(PUT, tensors())).tensors["rows"].shape == (2, 4)


@cases(
    ("chunks", "match"),
    [
        (raw(PUT, tensors(), version=1), "version 1"),
        (raw(PUT, tensors(), magic=b"http"), "mark of this protocol"),
        ([b"fdps"], "preamble"),
        (raw(b"{", tensors()), "no JSON"),
        (raw(b'{"op": NaN, "fields": {}}', tensors()), "no JSON"),
        (raw(b"[" * 60_000, tensors()), "no JSON"),
        (raw(b"\xff\xfe", tensors()), "no JSON"),
        (raw([1], tensors()), "object"),
        (raw({"op": "put"}, tensors()), "op and fields"),
        (raw({"op": 1, "fields": {}}, tensors()), "text"),
        (raw({"op": "put", "fields": {}, "more": 1}, tensors()), "nothing else"),
        (raw(b" " * (MAX_HEADER + 1)), "header takes"),
        (raw(PUT, tensors(), says=1 << 40), "oversized"),
        (raw(PUT), "no safetensors"),
        (raw(PUT, tensors()[:44]), "no safetensors"),
        (raw(PUT, struct.pack("<Q", 1 << 60) + bytes(100)), "header is too large"),
        (raw(PUT, struct.pack("<Q", 1 << 17) + b" " * (1 << 17)), "header is too large"),
        (raw({"op": "describe", "fields": {}}, tensors()), "takes no tensors"),
        (raw(PUT, tensors(rows={"dtype": "F64", "shape": [1, 4]})), "dtype torch.float64"),
        (raw(PUT, tensors(rows={"dtype": "U16", "shape": [4, 4]})), "dtype torch.uint16"),
        (raw(PUT, tensors(rows={"dtype": "F8_E8M0", "shape": [8, 4]})), "rows has|no safetensors"),
        (raw(PUT, tensors(rows={"dtype": ["F32"]})), "no safetensors"),
        (raw(PUT, tensors(rows={"shape": [4, 2]})), "shape"),
        (raw(PUT, tensors(rows={"shape": [8]})), "shape"),
        (raw(PUT, tensors(rows={"shape": [2, 2, 2]})), "shape"),
        (raw(PUT, tensors(rows={"shape": [0, 4], "data_offsets": [8, 8]})), "no safetensors"),
        *(
            (raw(PUT, tensors(rows=change)), "no safetensors")
            for change in (
                {"shape": [2.0, 4]},
                {"shape": [True, 4]},
                {"shape": "24"},
                {"shape": [3, 4]},
                {"shape": [10**30, 4]},
                {"shape": [1 << 29, 4]},
                {"data_offsets": [0, 32]},
                {"data_offsets": [-8, 24]},
                {"data_offsets": [8]},
                7,
            )
        ),
        (raw(PUT, tensors(other={"dtype": "F32", "shape": [0], "data_offsets": [40, 40]})), "they must be"),
        (raw(PUT, tensors() + bytes(8)), "no safetensors"),
    ],
)
def test_refusals(chunks, match):
    with pytest.raises(MessageRejected, match=match):
        joined(chunks)


def test_memory_follows_what_has_come():
    """A first chunk that announces 512 MiB and is the only one, or announces more than may come."""
    big = 1 << 29
    entries = {
        "rows": {"dtype": "F64", "shape": [big // 32, 4], "data_offsets": [0, big]},
        "lengths": {"dtype": "I64", "shape": [1], "data_offsets": [big, big + 8]},
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    payload = struct.pack("<Q", len(header)) + header
    (first,) = raw(PUT, payload, says=len(payload) + big + 8)
    first += bytes(CHUNK_BYTES - len(first))
    for most, match in ((1 << 30, "truncated"), (1 << 20, "oversized")):
        tracemalloc.start()
        with pytest.raises(MessageRejected, match=match):
            joined([first], most)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * CHUNK_BYTES
