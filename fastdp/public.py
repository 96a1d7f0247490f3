"""The one gate for text that counts as public: it is compared with the private data, record by record, before it is used."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from fastdp.methods.public import PublicText
from fastdp.tables import DataError

#: A run of so many words hardly comes twice unless one text was taken from the other.
WINDOW = 13
_WORD = re.compile(r"\w+")


class PublicGate:
    """Admits public files that are not the private data.

    Args:
        texts: of the private records.
        paths: of the files that hold them.
        confirmed: records that a public file may share with them, since somebody knows these to be public.
    """

    def __init__(self, texts: Sequence[str], paths: Sequence[str | Path], confirmed: int = 0):
        self._texts, self._paths, self._confirmed = texts, [Path(path) for path in paths], confirmed

    def admit(self, path: str | Path, texts: Sequence[str], lines: Sequence[int] | None = None) -> PublicText:
        """What the card says of a public file.

        A record is shared if at least half of its runs of `WINDOW` words are runs of private records, in any case and
        spacing; a shorter one, if it is a private record. This finds copies, shuffled, cut, joined or reformatted ones
        too, and no text that was written anew.

        Args:
            texts: of its records.
            lines: where they begin, for the refusal.

        Raises:
            DataError: if it is a private file, or shares more records than were confirmed.
        """
        path = Path(path)
        digest = content_digest(path)
        for private in self._paths:
            if path.resolve() == private.resolve() or (private.exists() and content_digest(private) == digest):
                raise DataError(f"{path} is said to be public, but is the private data itself: name public text")
        found = [at for at, text in enumerate(texts) if self._shared(text)]
        if len(found) > self._confirmed:
            where = "" if lines is None else f" (the first: line {lines[found[0]]})"
            raise DataError(
                f"{path}: {len(found)} of {len(texts)} records are private ones{where}. Take them out, or confirm with "
                f"public_overlap {len(found)} that they are public"
            )
        return PublicText(path.name, digest, len(texts), len(found))

    def _shared(self, text: str) -> bool:
        marks = _marks(text)
        return 2 * len(marks & self._private) >= len(marks)

    @cached_property
    def _private(self) -> set[int]:
        return {mark for text in self._texts for mark in _marks(text)}


def content_digest(path: Path) -> str:
    """SHA-256 of a file, in hex; of a folder, of the names and contents of its files."""
    found = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(inner for inner in path.rglob("*") if inner.is_file()):
        if file != path:
            found.update(f"{file.relative_to(path)}\0".encode())
        with open(file, "rb") as opened:
            while block := opened.read(1 << 20):
                found.update(block)
    return found.hexdigest()


def _marks(text: str) -> set[int]:
    """One number for each run of words; they hold in this process alone, and tell nothing outside of it."""
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold()) or [text.strip()]
    return {hash(tuple(words[at : at + WINDOW])) for at in range(max(1, len(words) - WINDOW + 1))}
