"""Adapters as bytes: a safetensors file in memory, which must hold the tensors of the adapter that the receiver has."""

from __future__ import annotations

from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fastdp.untrusted import quote

#: Most bytes of a file's header for each tensor, whose names are long.
_HEADER = 1024


def pack_adapter(state: Mapping[str, Tensor]) -> bytes:
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})


def unpack_adapter(data: bytes, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in a buffer, which may be hostile, in the order of the adapter ``like``.

    Raises ValueError for what is no safetensors file, and for other names, shapes or dtypes than those of ``like``.
    """
    size = sum(tensor.nbytes for tensor in like.values())
    if not size <= len(data) <= size + _HEADER * (1 + len(like)):
        raise ValueError(f"it holds {len(data)} bytes, for an adapter of {size}")
    try:
        found = load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError):
        raise ValueError("it is no safetensors file that can be read") from None
    for name in found.keys() - like.keys():
        raise ValueError(f"it has a tensor {quote(name)} that the adapter lacks")
    for name, own in like.items():
        if name not in found:
            raise ValueError(f"it lacks the tensor {name!r}")
        if found[name].shape != own.shape:
            raise ValueError(f"{name!r} has shape {quote(list(found[name].shape))}, not {list(own.shape)}")
        if found[name].dtype != own.dtype:
            raise ValueError(f"{name!r} is {found[name].dtype}, not {own.dtype}")
    return {name: found[name] for name in like}
