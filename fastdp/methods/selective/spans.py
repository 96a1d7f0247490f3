"""What a detector of private text reports, and the policy that decides which of it is private."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Span:
    """Characters ``start`` to ``end`` (exclusive) of a text, taken for an ``entity`` with a ``score`` in [0, 1]."""

    entity: str
    start: int
    end: int
    score: float = 1.0


@runtime_checkable
class PrivacyDetector(Protocol):
    """Finds private text. Whatever it misses is not protected, so state its miss rate (see `measure_detector`).

    A detector whose settings are private in part may have ``private_settings()``, JSON values that no card shows: kept draws
    are then refused when they change, of which only a keyed digest is written.
    """

    def detect(self, texts: Sequence[str]) -> list[list[Span]]:
        """The spans of each text, in any order; they may overlap."""

    def describe(self) -> dict[str, Any]:
        """Name and settings, for the card; JSON values."""


@dataclass(frozen=True)
class AnyOf:
    """A detector that finds what any of several does."""

    detectors: tuple[PrivacyDetector, ...]

    def detect(self, texts: Sequence[str]) -> list[list[Span]]:
        found = [detector.detect(texts) for detector in self.detectors]
        return [[span for spans in own for span in spans] for own in zip(*found, strict=True)]

    def describe(self) -> dict[str, Any]:
        return {"name": "any of several", "detectors": [detector.describe() for detector in self.detectors]}

    def private_settings(self) -> Any:
        return [getattr(detector, "private_settings", lambda: None)() for detector in self.detectors]


@dataclass(frozen=True)
class PrivacyPolicy:
    """What counts as private of what a detector reports.

    Args:
        entities: the kinds that are private; None for every kind that the detector knows.
        threshold: least score.
        whole_words: widen a span to the words it touches, so that no part of a word is left in the clear.
    """

    entities: frozenset[str] | None = None
    threshold: float = 0.0
    whole_words: bool = True

    def __post_init__(self) -> None:
        if self.entities is not None:
            object.__setattr__(self, "entities", frozenset(self.entities))
            if not self.entities:
                raise ValueError("entities is empty, so nothing would be private; name some, or give None for all")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}: a score lies between 0 and 1")

    def private(self, text: str, spans: Sequence[Span]) -> list[tuple[int, int]]:
        """The private stretches of ``text``: disjoint, in order; overlapping spans become one."""
        kept = []
        for span in spans:
            _check(span, text)
            if span.score >= self.threshold and (self.entities is None or span.entity in self.entities):
                kept.append((span.start, span.end))
        if self.whole_words and kept:
            words = [match.span() for match in _WORD.finditer(text)]
            kept = [_widen(stretch, words) for stretch in kept]
        return merge(kept)

    def describe(self) -> dict[str, Any]:
        return {
            "entities": None if self.entities is None else sorted(self.entities),
            "threshold": self.threshold,
            "whole_words": self.whole_words,
        }


def merge(stretches: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of half-open intervals, as disjoint ones in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def token_mask(offsets: Sequence[tuple[int, int]], stretches: Sequence[tuple[int, int]]) -> list[bool]:
    """Which tokens touch a private stretch of their text, as `PrivacyPolicy.private` returns them.

    Several tokens may share a character (the bytes of one letter); a token of no characters inside a stretch is private too.
    """
    return [any(start < to and max(end, start + 1) > since for since, to in stretches) for start, end in offsets]


def _check(span: Span, text: str) -> None:
    if not 0 <= span.start < span.end <= len(text):
        raise ValueError(
            f"a {span.entity} span covers characters {span.start} to {span.end} of a text of {len(text)}: the detector "
            "must report half-open ranges inside the text"
        )
    if not (math.isfinite(span.score) and 0 <= span.score <= 1):
        raise ValueError(f"a {span.entity} span has score {span.score}: a score lies between 0 and 1")


def _widen(stretch: tuple[int, int], words: Sequence[tuple[int, int]]) -> tuple[int, int]:
    start, end = stretch
    touched = [word for word in words if word[0] < end and word[1] > start]
    if not touched:
        return stretch
    return min(start, touched[0][0]), max(end, touched[-1][1])
