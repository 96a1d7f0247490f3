"""Messages as bytes: a preamble with the version, a JSON header, a safetensors payload, cut into chunks of 1 MiB.

A message says all its lengths in its first chunk, and that chunk holds every dtype and shape. Nothing is allocated before
they have been compared with what the operation takes; after that every chunk has one length it may have.
"""

from __future__ import annotations

import hashlib
import io
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch
from torch import Tensor

from fastdp.accounting.serialisation import canonical
from fastdp.untrusted import parse_json_object, quote

PROTOCOL_VERSION = 2
CHUNK_BYTES = 1 << 20
#: Most bytes of a header, ours or that of safetensors: both fit in the first chunk.
MAX_HEADER = 1 << 16
MAGIC = b"fdps"
PREAMBLE = struct.Struct(">4sHIQ")

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}
FLOAT_TYPES = ("F32", "BF16", "F16")


class MessageRejected(ValueError):
    """A message that is not accepted, and why.

    Attributes:
        code: name of a gRPC status. ``UNAVAILABLE`` asks to try again, ``ABORTED`` to take up the run where it is.
    """

    def __init__(self, reason: str, code: str = "INVALID_ARGUMENT"):
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor of a message must be.

    Attributes:
        dtypes: safetensors' names.
        shape: of each dimension the size, or the least and the most.
    """

    dtypes: tuple[str, ...]
    shape: tuple[int | tuple[int, int], ...]

    def check(self, name: str, dtype: Any, shape: Any) -> None:
        """Raises Rejected for another dtype or shape."""
        if dtype not in self.dtypes:
            raise MessageRejected(f"{name} has dtype {quote(dtype)}: it must be {' or '.join(self.dtypes)}")
        fits = isinstance(shape, list) and len(shape) == len(self.shape)
        if not fits or not all(_fits(size, wanted) for size, wanted in zip(shape, self.shape)):
            raise MessageRejected(
                f"{name} has shape {quote(shape)}: it must be [{', '.join(map(_size_text, self.shape))}]"
            )


#: From an operation's name and fields to the tensors it takes; None for any, where the payload goes to a file.
Expect = Callable[[str, dict[str, Any]], Mapping[str, TensorSpec] | None]


@dataclass(frozen=True)
class Message:
    """A message that arrived.

    Attributes:
        op: what it asks for, or answers.
        fields: its settings.
        tensors: views of one buffer; none where the payload went to a file.
        digest: SHA-256 of header and payload, in hex.
    """

    op: str
    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    digest: str


@dataclass(frozen=True)
class Outgoing:
    """A message to send, once or again; iterating yields its chunks.

    Attributes:
        op: what it asks for, or answers.
        fields: JSON values.
        payload: safetensors, as bytes or as a file that is read as it is sent.
    """

    op: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    payload: bytes | Path = b""

    @classmethod
    def of(cls, op: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Outgoing:
        """With tensors, which are copied."""
        ready = {name: tensor.detach().cpu().contiguous() for name, tensor in (tensors or {}).items()}
        return cls(op, fields, safetensors.torch.save(ready) if ready else b"")

    def __iter__(self) -> Iterator[bytes]:
        header = canonical({"op": self.op, "fields": dict(self.fields)}).encode()
        if len(header) > MAX_HEADER:
            raise ValueError(f"the header of {self.op} takes {len(header)} bytes: {MAX_HEADER} is the most")
        size = self.payload.stat().st_size if isinstance(self.payload, Path) else len(self.payload)
        head = PREAMBLE.pack(MAGIC, PROTOCOL_VERSION, len(header), size) + header
        with self._open() as file:
            yield head + file.read(CHUNK_BYTES - len(head))
            while block := file.read(CHUNK_BYTES):
                yield block

    def _open(self) -> IO[bytes]:
        return open(self.payload, "rb") if isinstance(self.payload, Path) else io.BytesIO(self.payload)


def receive(chunks: Iterator[bytes], expect: Expect, max_payload: int, file: IO[bytes] | None = None) -> Message:
    """Take a message in, chunk by chunk; its payload goes to ``file`` if there is one.

    Raises Rejected, at the first chunk that shows it, for another version, a header that cannot be read, fields, dtypes or
    shapes that the operation does not take, more than ``max_payload`` bytes, and chunks cut short or too many.
    """
    first = next(chunks, None)
    if first is None:
        raise MessageRejected("the message is empty")
    at, total = _read_preamble(first, max_payload)
    op, fields = _read_header(first[PREAMBLE.size : at])
    specs = expect(op, fields)
    layout = {} if specs is None else _read_layout(first[at:], total - at, specs)
    digest = hashlib.sha256(first[PREAMBLE.size :])
    buffer = bytearray(0 if file else total - at)
    held = memoryview(buffer)
    seen = len(first)
    _keep(first[at:], 0, held, file)
    for chunk in chunks:
        _check_chunk(len(chunk), seen, total)
        digest.update(chunk)
        _keep(chunk, seen - at, held, file)
        seen += len(chunk)
    if seen != total:
        raise MessageRejected(f"the message is truncated: {seen} of {total} bytes came")
    return Message(op, fields, _views(buffer, layout), digest.hexdigest())


def _read_preamble(first: bytes, max_payload: int) -> tuple[int, int]:
    """Where the payload begins, and the message's length."""
    if len(first) < PREAMBLE.size:
        raise MessageRejected(f"the first chunk has {len(first)} bytes: the preamble alone takes {PREAMBLE.size}")
    magic, version, header, payload = PREAMBLE.unpack_from(first)
    if magic != MAGIC:
        raise MessageRejected("the message does not begin with the mark of this protocol")
    if version != PROTOCOL_VERSION:
        raise MessageRejected(
            f"the message is of version {version}: this side speaks version {PROTOCOL_VERSION}", "FAILED_PRECONDITION"
        )
    if header > MAX_HEADER:
        raise MessageRejected(f"the header takes {header} bytes: {MAX_HEADER} is the most")
    if payload > max_payload:
        raise MessageRejected(
            f"the message is oversized: a payload of {payload} bytes, where {max_payload} is the most"
        )
    at = PREAMBLE.size + header
    _check_chunk(len(first), 0, at + payload)
    return at, at + payload


def _check_chunk(length: int, seen: int, total: int) -> None:
    if seen == total:
        raise MessageRejected("the message is longer than it said")
    wanted = min(CHUNK_BYTES, total - seen)
    if length != wanted:
        raise MessageRejected(
            f"a chunk at byte {seen} has {length} bytes, not {wanted}: it is truncated or of another message"
        )


def _read_header(data: bytes) -> tuple[str, dict[str, Any]]:
    header = _json(data, "the header")
    if set(header) != {"op", "fields"}:
        raise MessageRejected("the header must have an op and fields, and nothing else")
    op, fields = header["op"], header["fields"]
    if not isinstance(op, str) or not isinstance(fields, dict):
        raise MessageRejected("the header's op must be a text and its fields an object")
    return op, fields


def _read_layout(
    first: bytes, length: int, specs: Mapping[str, TensorSpec]
) -> dict[str, tuple[torch.dtype, list[int], int]]:
    """Dtype, shape and place in the payload of each tensor, after checking that they are those of ``specs``."""
    if not specs:
        if length:
            raise MessageRejected("the operation takes no tensors, and the message has a payload")
        return {}
    if length < 8:
        raise MessageRejected("the payload is no safetensors: it is too short")
    (size,) = struct.unpack_from("<Q", first)
    if size > MAX_HEADER or 8 + size > length or size % 8:
        raise MessageRejected("the payload is no safetensors: its header has an impossible length")
    entries = _json(first[8 : 8 + size], "the payload's header")
    if set(entries) != set(specs):
        raise MessageRejected(f"the tensors are {quote(sorted(entries))}: they must be {sorted(specs)}")
    layout, spans = {}, []
    for name, spec in specs.items():
        entry = entries[name]
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise MessageRejected(f"{name} must have a dtype, a shape and data_offsets")
        spec.check(name, entry["dtype"], entry["shape"])
        dtype, offsets = _DTYPES[entry["dtype"]], entry["data_offsets"]
        nbytes = math.prod(entry["shape"]) * dtype.itemsize
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(o) for o in offsets):
            raise MessageRejected(f"{name} has data_offsets {quote(offsets)}: they must be two whole numbers")
        if offsets[1] - offsets[0] != nbytes or offsets[0] % dtype.itemsize:
            raise MessageRejected(f"{name} has {quote(offsets)} as its bytes, which do not fit its shape and dtype")
        spans.append(tuple(offsets))
        layout[name] = (dtype, entry["shape"], 8 + size + offsets[0])
    spans.sort()
    if [0, *(end for _, end in spans)] != [*(begin for begin, _ in spans), length - 8 - size]:
        raise MessageRejected("the tensors overlap, or do not fill the payload")
    return layout


def _json(data: bytes, what: str) -> dict[str, Any]:
    try:
        return parse_json_object(data)
    except ValueError:
        raise MessageRejected(f"{what} is no JSON object that can be read") from None


def _keep(part: bytes, at: int, held: memoryview, file: IO[bytes] | None) -> None:
    if file is not None:
        file.write(part)
    else:
        held[at : at + len(part)] = part


def _views(buffer: bytearray, layout: Mapping[str, tuple[torch.dtype, list[int], int]]) -> dict[str, Tensor]:
    return {
        name: torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=at).reshape(shape)
        for name, (dtype, shape, at) in layout.items()
    }


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _fits(size: Any, wanted: int | tuple[int, int]) -> bool:
    low, high = wanted if isinstance(wanted, tuple) else (wanted, wanted)
    return _is_count(size) and low <= size <= high


def _size_text(size: int | tuple[int, int]) -> str:
    return f"{size[0]} to {size[1]}" if isinstance(size, tuple) else str(size)
