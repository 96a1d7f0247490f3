"""Messages that no vendor may accept: each is made so that something in it is wrong."""

import json
import struct

import torch
from hypothesis import strategies as st

from fastdp.split.wire import CHUNK_BYTES, PREAMBLE, Outgoing

JUNK = st.one_of(
    st.none(),
    st.text(max_size=5),
    st.floats(),
    st.integers(max_value=-1),
    st.integers(min_value=1 << 60),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.booleans(), max_size=2),
)


def cut(data):
    return [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]


@st.composite
def malformed(draw, served, step, count):
    """Chunks of a bad message for a run at ``step`` with ``count`` examples."""
    good = draw(_good(served, step, count))
    change = draw(st.sampled_from([_random, _truncated, _longer, _preamble, _fields, _layout, _numbers, _byte, _recut]))
    return change(draw, good, step, count)


@st.composite
def _good(draw, served, step, count):
    """Operation, fields, tensors that the vendor would take."""
    rows = {"rows": torch.ones(3, served.width), "lengths": torch.tensor([1, 2])}
    return draw(
        st.sampled_from(
            [
                ("put", {"first": count}, rows),
                ("predict", {}, rows),
                ("forward", {"step": step}, {"indices": torch.tensor([0, 1])}),
                ("backward", {"step": step}, {"gradient": torch.ones(4, served.classes)}),
            ]
        )
    )


def _data(good):
    return b"".join(Outgoing.of(*good))


def _random(draw, good, step, count):
    return draw(st.lists(st.binary(max_size=300), max_size=3))


def _truncated(draw, good, step, count):
    data = _data(good)
    return cut(data[: draw(st.integers(0, len(data) - 1))])


def _longer(draw, good, step, count):
    extra = draw(st.binary(min_size=1, max_size=40))
    return draw(st.sampled_from([cut(_data(good) + extra), [*cut(_data(good)), extra]]))


def _recut(draw, good, step, count):
    data = _data(good)
    at = draw(st.integers(1, len(data) - 1))
    return [data[:at], data[at:]]


def _preamble(draw, good, step, count):
    data = _data(good)
    values = list(PREAMBLE.unpack_from(data))
    which = draw(st.integers(0, 3))
    junk = (st.binary(min_size=4, max_size=4), *(st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64)))[which]
    values[which] = draw(junk.filter(lambda value: value != values[which]))
    return cut(PREAMBLE.pack(*values) + data[PREAMBLE.size :])


def _with_header(data, header):
    magic, version, length, payload = PREAMBLE.unpack_from(data)
    return cut(PREAMBLE.pack(magic, version, len(header), payload) + header + data[PREAMBLE.size + length :])


def _fields(draw, good, step, count):
    """Operation, fields or the whole header replaced; numbers that are no step or example of this run."""
    op, fields, _ = good
    kind = draw(st.sampled_from(["header", "op", "extra", "field"]))
    header = {"op": op, "fields": dict(fields)}
    if kind == "header":
        return _with_header(_data(good), json.dumps(draw(JUNK)).encode())
    if kind == "op":
        header["op"] = draw(JUNK)
    elif kind == "extra" or not fields:
        place = draw(st.sampled_from([header, header["fields"]]))
        place[draw(st.text(min_size=1, max_size=4).filter(lambda name: name not in place))] = draw(JUNK)
    else:
        (name,) = fields
        header["fields"][name] = draw(JUNK | st.integers(1, 5).map(lambda more: fields[name] + more))
    return _with_header(_data(good), json.dumps(header).encode())


def _layout(draw, good, step, count):
    """Dtype, shape or offsets of one tensor replaced."""
    data = _data(good)
    _, _, length, _ = PREAMBLE.unpack_from(data)
    at = PREAMBLE.size + length
    (size,) = struct.unpack_from("<Q", data, at)
    layout = json.loads(data[at + 8 : at + 8 + size])
    entry = layout[draw(st.sampled_from(sorted(layout)))]
    key = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
    dtypes = st.sampled_from(["F64", "I32", "U8", "BOOL", "F8_E4M3", "f32"])
    numbers = st.lists(st.integers(-1, 1 << 40), max_size=3).filter(lambda value: value != entry[key])
    entry[key] = draw(JUNK | (dtypes if key == "dtype" else numbers))
    header = json.dumps(layout).encode()
    header += b" " * (-len(header) % 8)
    payload = struct.pack("<Q", len(header)) + header + data[at + 8 + size :]
    magic, version, _, _ = PREAMBLE.unpack_from(data)
    return cut(PREAMBLE.pack(magic, version, length, len(payload)) + data[PREAMBLE.size : at] + payload)


def _numbers(draw, good, step, count):
    """Values that cannot be: a NaN or an infinity among rows, lengths and indices of nothing."""
    op, fields, tensors = good
    tensors = {name: value.clone() for name, value in tensors.items()}
    name = draw(st.sampled_from(sorted(tensors)))
    value = tensors[name].view(-1)
    at = draw(st.integers(0, len(value) - 1))
    wrong = st.sampled_from([float("nan"), float("inf"), float("-inf")])
    if not value.is_floating_point():
        # Lengths and indices: below what there is, or above it; a length of 3 too many does not add up either.
        wrong = st.sampled_from([-1, -(1 << 62), count, count + 3, 1 << 40])
    value[at] = draw(wrong)
    return list(Outgoing.of(op, fields, tensors))


def _byte(draw, good, step, count):
    """One byte of a message that is in every case for another example than the next, or step than this one."""
    op, fields, tensors = good
    if not fields:
        op, fields = "put", {"first": count}
    (name,) = fields
    data = bytearray(_data((op, {name: 99_999}, tensors)))
    at = draw(st.integers(0, len(data) - 1))
    data[at] ^= draw(st.integers(1, 255))
    return cut(bytes(data))
