"""Digests of released weights, by which a card names what it speaks of."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fastdp.untrusted import open_regular, parse_json_object

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_HEADER = 1 << 25
_PIECE = 1 << 24
#: What safetensors calls torch's dtypes.
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def digests(tensors: Iterable[Tensor]) -> list[str]:
    """SHA-256 (hex) of dtype, shape and bytes of each tensor, sorted.

    Names do not count, as programs that save weights rename them.
    """
    import torch

    found = []
    for tensor in tensors:
        whole = tensor.detach().cpu().contiguous()
        digest = _begun(_NAMES[str(whole.dtype).removeprefix("torch.")], list(whole.shape))
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().data)
        found.append(digest.hexdigest())
    return sorted(found)


def named_digest(tensors: Mapping[str, Tensor]) -> str:
    """One SHA-256 (hex) of names, types, shapes and values of tensors, in the order of their names."""
    import torch

    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{name} {plain.dtype} {list(plain.shape)} ".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


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
    """The same of every tensor in a folder's safetensors files, or in one such file, and its number of elements.

    Raises ValueError for a folder that has none, and for a file that cannot be read.
    """
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no .safetensors file, and weights of other formats cannot be compared")
    found: dict[str, int] = {}
    for file in files:
        try:
            found.update(_digests_in(file))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is no safetensors file that can be read: {error}") from None
    return found


def _digests_in(path: Path) -> Iterator[tuple[str, int]]:
    with open_regular(path) as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        if length > _LARGEST_HEADER:
            raise ValueError("its header is too long")
        header = parse_json_object(file.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            # Entries that overlap would have the file read as often as a stranger likes.
            size -= end - begin
            if not 0 <= begin <= end or size < 0:
                raise ValueError("its tensors overlap, or lie outside the file")
            file.seek(8 + length + begin)
            digest = _begun(entry["dtype"], entry["shape"])
            for piece in _pieces(file, end - begin):
                digest.update(piece)
            yield digest.hexdigest(), math.prod(entry["shape"])


def _pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    while size > 0:
        piece = file.read(min(size, _PIECE))
        if not piece:
            raise ValueError("it was cut short")
        size -= len(piece)
        yield piece


def _begun(dtype: str, shape: list[int]) -> Any:
    return hashlib.sha256(f"{dtype} {shape}\n".encode())
