"""Adapters as bytes: one buffer of all tensors in a fixed order, and the layout that says what is where."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fastdp.accounting.serialisation import canonical
from fastdp.untrusted import parse_json, quote

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class AdapterLayout:
    """Name, dtype and shape of each tensor of an adapter, in the order of its bytes.

    A buffer and a layout cost the adapter's own size and a hundred bytes a tensor; a message of named arrays would cost
    five hundred a tensor, over 5% of a small adapter.
    """

    entries: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> AdapterLayout:
        """The layout of ``state``. Raises ValueError for a dtype that does not travel."""
        names = {dtype: name for name, dtype in _DTYPES.items()}
        for name, tensor in state.items():
            if tensor.dtype not in names:
                raise ValueError(f"{name} is {tensor.dtype}: adapters travel as {', '.join(_DTYPES)}")
        return cls(tuple((name, names[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items()))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return sum(_DTYPES[dtype].itemsize * math.prod(shape) for _, dtype, shape in self.entries)

    def to_json(self) -> str:
        """Canonical JSON: a list of [name, dtype, shape]."""
        return canonical([[name, dtype, list(shape)] for name, dtype, shape in self.entries])

    def difference(self, text: str) -> str | None:
        """How the layout in JSON ``text`` differs from this one, in a few words; None if it does not."""
        if text == self.to_json():
            return None
        try:
            theirs = {str(name): (dtype, tuple(shape)) for name, dtype, shape in parse_json(text)}
        except (ValueError, TypeError):
            return "its layout cannot be read"
        own = {name: (dtype, shape) for name, dtype, shape in self.entries}
        for name in theirs.keys() - own.keys():
            return f"it has a tensor {quote(name)} that the adapter lacks"
        for name, (dtype, shape) in own.items():
            if name not in theirs:
                return f"it lacks the tensor {name!r}"
            if theirs[name][1] != shape:
                return f"{name!r} has shape {quote(list(theirs[name][1]))}, not {list(shape)}"
            if theirs[name][0] != dtype:
                return f"{name!r} is {quote(theirs[name][0])}, not {dtype}"
        return "its tensors are in another order"

    def pack(self, state: Mapping[str, Tensor]) -> bytes:
        """The tensors of ``state`` as one buffer. Raises ValueError if they are not of this layout."""
        problem = self.difference(AdapterLayout.of(state).to_json())
        if problem is not None:
            raise ValueError(f"the adapter changed while it was trained: {problem}")
        parts = (tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for tensor in state.values())
        return b"".join(part.numpy().tobytes() for part in parts)

    def unpack(self, data: bytes) -> dict[str, Tensor]:
        """The tensors in a buffer, copied. Raises ValueError for another number of bytes."""
        if len(data) != self.nbytes:
            raise ValueError(f"the buffer holds {len(data)} bytes, not {self.nbytes}")
        state, at = {}, 0
        for name, dtype, shape in self.entries:
            count = math.prod(shape)
            size = _DTYPES[dtype].itemsize * count
            # torch reads no empty buffer.
            flat = torch.frombuffer(bytearray(data[at : at + size]), dtype=_DTYPES[dtype]) if size else torch.empty(0)
            state[name] = flat.to(_DTYPES[dtype]).reshape(shape)
            at += size
        return state
