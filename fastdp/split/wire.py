"""Messages as bytes: a preamble with the version, a JSON header, a safetensors payload, cut into chunks of 1 MiB.

A message says all its lengths in its first chunk, which are compared with what the operation takes. After that every chunk has
one length it may have.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fastdp.accounting.serialisation import canonical
from fastdp.untrusted import parse_json_object, quote

PROTOCOL_VERSION = 2
CHUNK_BYTES = 1 << 20
#: Most bytes of a header, which fits in the first chunk.
MAX_HEADER = 1 << 16
MAGIC = b"fdps"
PREAMBLE = struct.Struct(">4sHIQ")

FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


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
        dtypes: any of these.
        shape: of each dimension the size, or the least and the most.
    """

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int | tuple[int, int], ...]

    def check(self, name: str, tensor: Tensor) -> None:
        """Raises MessageRejected for another dtype or shape."""
        if tensor.dtype not in self.dtypes:
            raise MessageRejected(f"{name} has dtype {tensor.dtype}: it must be {' or '.join(map(str, self.dtypes))}")
        if tensor.dim() != len(self.shape) or not all(map(_fits, tensor.shape, self.shape)):
            raise MessageRejected(
                f"{name} has shape {quote(list(tensor.shape))}: it must be [{', '.join(map(_size_text, self.shape))}]"
            )


#: From an operation's name and fields to the tensors it takes; None for any, where the payload goes to a file.
Expect = Callable[[str, dict[str, Any]], Mapping[str, TensorSpec] | None]


@dataclass(frozen=True)
class Message:
    """A message that arrived.

    Attributes:
        op: what it asks for, or answers.
        fields: its settings.
        tensors: none where the payload went to a file.
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
        return cls(op, fields, save(ready) if ready else b"")

    def __iter__(self) -> Iterator[bytes]:
        header = canonical({"op": self.op, "fields": dict(self.fields)}).encode()
        if len(header) > MAX_HEADER:
            raise ValueError(f"the header of {self.op} takes {len(header)} bytes: {MAX_HEADER} is the most")
        size = self.payload.stat().st_size if isinstance(self.payload, Path) else len(self.payload)
        head = PREAMBLE.pack(MAGIC, PROTOCOL_VERSION, len(header), size) + header
        with open(self.payload, "rb") if isinstance(self.payload, Path) else io.BytesIO(self.payload) as file:
            yield head + file.read(CHUNK_BYTES - len(head))
            while block := file.read(CHUNK_BYTES):
                yield block


def receive(chunks: Iterator[bytes], expect: Expect, max_payload: int, file: IO[bytes] | None = None) -> Message:
    """Take a message in, chunk by chunk; its payload goes to ``file`` if there is one.

    Raises MessageRejected, at the first chunk that shows it, for another version, a header that cannot be read, fields that the
    operation does not take, more than ``max_payload`` bytes, and chunks cut short or too many; and for other tensors.
    """
    first = next(chunks, None)
    if first is None:
        raise MessageRejected("the message is empty")
    at, total = _read_preamble(first, max_payload)
    op, fields = _read_header(first[PREAMBLE.size : at])
    specs = expect(op, fields)
    if specs is not None and not specs and total > at:
        raise MessageRejected("the operation takes no tensors, and the message has a payload")
    digest, seen, payload = hashlib.sha256(first[PREAMBLE.size :]), len(first), bytearray()
    keep = payload.extend if file is None else file.write
    keep(first[at:])
    for chunk in chunks:
        _check_chunk(len(chunk), seen, total)
        digest.update(chunk)
        keep(chunk)
        seen += len(chunk)
    if seen != total:
        raise MessageRejected(f"the message is truncated: {seen} of {total} bytes came")
    return Message(op, fields, _read_tensors(bytes(payload), specs) if specs else {}, digest.hexdigest())


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
    try:
        header = parse_json_object(data)
    except ValueError:
        raise MessageRejected("the header is no JSON object that can be read") from None
    if set(header) != {"op", "fields"}:
        raise MessageRejected("the header must have an op and fields, and nothing else")
    op, fields = header["op"], header["fields"]
    if not isinstance(op, str) or not isinstance(fields, dict):
        raise MessageRejected("the header's op must be a text and its fields an object")
    return op, fields


def _read_tensors(payload: bytes, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    if int.from_bytes(payload[:8], "little") > MAX_HEADER:
        raise MessageRejected(f"the payload's header is too large: {MAX_HEADER} bytes are the most")
    try:
        found = load(payload)
    # Of a dtype that torch lacks the library raises KeyError.
    except (SafetensorError, KeyError, ValueError, RuntimeError):
        raise MessageRejected("the payload is no safetensors that can be read") from None
    if found.keys() != specs.keys():
        raise MessageRejected(f"the tensors are {quote(sorted(found))}: they must be {sorted(specs)}")
    for name, spec in specs.items():
        spec.check(name, found[name])
    return found


def _fits(size: int, wanted: int | tuple[int, int]) -> bool:
    low, high = wanted if isinstance(wanted, tuple) else (wanted, wanted)
    return low <= size <= high


def _size_text(size: int | tuple[int, int]) -> str:
    return f"{size[0]} to {size[1]}" if isinstance(size, tuple) else str(size)
