"""What a card says of text that counts as public: where it came from, and what it was compared with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PublicText:
    """Text that a method learns from without paying for it: its file's name, content, and number of records."""

    name: str
    sha256: str
    records: int
    #: Those that the private data holds too, which somebody confirmed to be public.
    shared: int

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def describe_origin(origin: PublicText | None) -> dict[str, Any] | str:
    """For the card, where a program may have given no file to compare."""
    return "not compared with the private data" if origin is None else origin.describe()
