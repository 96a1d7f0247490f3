"""The one way to leave a file: whole, on the disk, and readable by its owner alone unless it is meant to be public.

A run's checkpoints, metrics, stores and ledgers are computed from private data without noise, so they are private artefacts.
Public are cards, pictures and released texts, and whoever writes one says so.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_PRIVATE, _PUBLIC = 0o600, 0o644


def make_folder(path: str | os.PathLike[str], *, public: bool = False) -> None:
    """Make a folder and those above it that are missing, for their owner alone unless they are public."""
    path = Path(path)
    if not path.parent.exists():
        make_folder(path.parent, public=public)
    path.mkdir(0o777 if public else 0o700, exist_ok=True)


@contextmanager
def atomic_path(path: str | os.PathLike[str], *, public: bool = False) -> Iterator[Path]:
    """A path to write to, which becomes ``path`` when the block ends: a kill leaves what was there before, or all of it.

    The block gets an empty file in the folder of ``path``, which is made if it is missing. At its end that file is synced,
    renamed, and the folder is synced; if the block raises, it is removed and ``path`` stays as it was.
    """
    path = Path(path)
    make_folder(path.parent, public=public)
    if path.exists() and not path.is_file():
        # A rename by root puts a file in the place of a device.
        raise FileExistsError(errno.EEXIST, "not a regular file", str(path))
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    aside = Path(name)
    try:
        yield aside
        # The block may have put another file in the place of the empty one.
        aside.chmod(_PUBLIC if public else _PRIVATE)
        sync(aside)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write(path: str | os.PathLike[str], content: str | bytes, *, public: bool = False) -> None:
    """Write text (UTF-8) or bytes as `atomic_path` does."""
    with atomic_path(path, public=public) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: str | os.PathLike[str], value: Any, *, public: bool = False) -> None:
    """Write indented JSON as `atomic_path` does."""
    write(path, json.dumps(value, indent=2) + "\n", public=public)


def write_rows(path: str | os.PathLike[str], rows: Iterable[Any]) -> None:
    """Write one JSON value a line as `atomic_path` does."""
    write(path, "".join(json.dumps(row, default=str) + "\n" for row in rows))


def save_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors of any device and layout as a safetensors file, as `atomic_path` does."""
    from safetensors.torch import save_file

    with atomic_path(path) as aside:
        ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(ready, aside, None if metadata is None else dict(metadata))


@contextmanager
def kept_tensors(path: str | os.PathLike[str], kind: str) -> Iterator[tuple[dict[str, Tensor], dict[str, str]]]:
    """Tensors by name, which is not the order of the file, and metadata of a file of `save_tensors`.

    Raises:
        ValueError: that ``path`` is no ``kind``, if it is damaged or the block cannot read what it holds.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
            tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
        yield tensors, metadata
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        reason = "it is damaged" if isinstance(error, SafetensorError) else error
        raise ValueError(f"{path} is no {kind}: {reason}") from None


def appending(path: str | os.PathLike[str]) -> IO[str]:
    """A private text file, open for appending."""
    return open(path, "a", encoding="utf-8", opener=private)


def private(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor as `os.open` gives it, of a file that its owner alone may read from here on; an opener for `open`."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, _PRIVATE)
    os.fchmod(descriptor, _PRIVATE)
    return descriptor


def sync(path: str | os.PathLike[str]) -> None:
    """Return once a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
