"""Digests of released weights, by which a card names what it speaks of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from fastdp.untrusted import open_regular, quote

if TYPE_CHECKING:
    from torch import Tensor

_PIECE = 1 << 24
#: What safetensors, and so a digest of a saved file, calls torch's dtypes. Others have torch's own name there.
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def digests(tensors: Iterable[Tensor]) -> list[str]:
    """SHA-256 (hex) of dtype, shape and bytes of each tensor, sorted.

    Names do not count, as programs that save weights rename them.
    """
    return sorted(map(_digest, tensors))


def named_digest(tensors: Mapping[str, Tensor]) -> str:
    """One SHA-256 (hex) of names, types, shapes and values of tensors, in the order of their names."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        found.update(value_bytes(tensor))
    return found.hexdigest()


def value_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's values, in the order of its indices."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def model_files(folder: Path) -> dict[str, str]:
    """SHA-256 (hex) of each file of a model's folder that says what the model is: weights, and an adapter's config."""
    found = {}
    for path in sorted(folder.iterdir()):
        weights = path.suffix == ".safetensors" or fnmatch(path.name, "*_model*.bin")
        if weights or path.name == "adapter_config.json":
            digest = hashlib.sha256()
            with open_regular(path) as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
            found[path.name] = digest.hexdigest()
    return found


def digests_of(folder: Path) -> dict[str, int]:
    """Numbers of elements of every tensor in a folder's safetensors files, or in one such file, by its digest."""
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no .safetensors file, and weights of other formats cannot be compared")
    from safetensors import SafetensorError, safe_open

    found: dict[str, int] = {}
    for file in files:
        name = None
        try:
            open_regular(file).close()
            with safe_open(file, "pt") as opened:  # type: ignore[no-untyped-call]
                for name in opened.keys():  # noqa: SIM118
                    tensor = opened.get_tensor(name)
                    found[_digest(tensor)] = tensor.numel()
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            advice = (
                "copy it again" if name is None else f"tensor {quote(name)} has no dtype of torch's: save it in one"
            )
            reason = advice if isinstance(error, SafetensorError) else error
            raise ValueError(f"{file} is no safetensors file that can be read: {reason}") from None
    return found


def _digest(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    dtype = _NAMES.get(dtype, dtype)
    digest = hashlib.sha256(f"{dtype} {list(tensor.shape)}\n".encode())
    digest.update(value_bytes(tensor))
    return digest.hexdigest()
