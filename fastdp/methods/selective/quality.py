"""What a detector finds and what it misses, measured on labelled text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdp.methods.selective.spans import PrivacyDetector, PrivacyPolicy, Span, merge


@dataclass(frozen=True)
class EntityQuality:
    """Figures of one entity: of its ``labelled`` spans, those covered whole or in part; of its ``reported``, the right ones.

    A labelled span counts as covered by whatever was reported, under any name: what is perturbed is protected. A reported
    span is right if it touches labelled text of any entity.
    """

    entity: str
    labelled: int
    covered: int
    touched: int
    reported: int
    right: int

    @property
    def recall(self) -> float | None:
        """Share of labelled spans covered whole; None if there is none."""
        return self.covered / self.labelled if self.labelled else None

    @property
    def precision(self) -> float | None:
        """Share of reported spans that touch labelled text; None if nothing was reported."""
        return self.right / self.reported if self.reported else None


@dataclass(frozen=True)
class DetectorQuality:
    """What a detector, under a policy, did on labelled texts.

    Attributes:
        by_entity: figures of each entity that was labelled or reported.
        texts: number of texts.
        labelled_characters, missed_characters: of the labelled text that the policy calls private.
        corpus: where the labels come from, for the card.
    """

    by_entity: tuple[EntityQuality, ...]
    texts: int
    labelled_characters: int
    missed_characters: int
    corpus: str

    @property
    def span_miss_rate(self) -> float:
        """Share of labelled spans not covered whole: each leaves private text in the clear."""
        labelled = sum(entity.labelled for entity in self.by_entity)
        return 1 - sum(entity.covered for entity in self.by_entity) / labelled if labelled else 0.0

    @property
    def character_miss_rate(self) -> float:
        """Share of labelled private characters left in the clear."""
        return self.missed_characters / self.labelled_characters if self.labelled_characters else 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON values, for the card and for result files."""
        return {
            "corpus": self.corpus,
            "texts": self.texts,
            "span_miss_rate": self.span_miss_rate,
            "character_miss_rate": self.character_miss_rate,
            "by_entity": {
                e.entity: {
                    "labelled": e.labelled,
                    "recall": e.recall,
                    "touched": e.touched / e.labelled if e.labelled else None,
                    "reported": e.reported,
                    "precision": e.precision,
                }
                for e in self.by_entity
            },
        }


def measure_detector(
    detector: PrivacyDetector,
    texts: Sequence[str],
    labels: Sequence[Sequence[Span]],
    policy: PrivacyPolicy | None = None,
    corpus: str = "labelled spans given by the caller",
) -> DetectorQuality:
    """Compare a detector with labelled spans; only labels of entities that the policy calls private count.

    Raises:
        ValueError: for as many labels as texts not being given, labels outside their text, or none that is private.
    """
    policy = PrivacyPolicy() if policy is None else policy
    if len(texts) != len(labels):
        raise ValueError(f"{len(labels)} lists of labels were given for {len(texts)} texts: give one for each")
    wanted = [[s for s in own if policy.entities is None or s.entity in policy.entities] for own in labels]
    if not any(wanted):
        raise ValueError("no text carries a label that the policy calls private, so nothing can be measured")
    exact = PrivacyPolicy(policy.entities, whole_words=False)
    counts: dict[str, Counter[str]] = {"labelled": Counter(), "covered": Counter(), "touched": Counter()}
    counts |= {"reported": Counter(), "right": Counter()}
    characters = missed = 0
    for text, own, found in zip(texts, wanted, detector.detect(texts)):
        truth = exact.private(text, own)
        perturbed = policy.private(text, found)
        characters += sum(end - start for start, end in truth)
        missed += sum(end - start - _overlap((start, end), perturbed) for start, end in truth)
        for span in own:
            inside = _overlap((span.start, span.end), perturbed)
            counts["labelled"][span.entity] += 1
            counts["covered"][span.entity] += inside == span.end - span.start
            counts["touched"][span.entity] += inside > 0
        for span in found:
            if policy.private(text, [span]):
                counts["reported"][span.entity] += 1
                counts["right"][span.entity] += _overlap((span.start, span.end), truth) > 0
    entities = sorted(counts["labelled"] | counts["reported"])
    rows = tuple(
        EntityQuality(entity, **{name: found[entity] for name, found in counts.items()}) for entity in entities
    )
    return DetectorQuality(rows, len(texts), characters, missed, corpus)


def read_labelled_spans(path: str | Path) -> tuple[list[str], list[list[Span]]]:
    """Texts and labels of a JSON file in the form of Presidio's synthetic data sets.

    A list of objects with ``full_text`` and ``spans``, each span with ``entity_type``, ``start_position`` and
    ``end_position``.

    Raises:
        ValueError: for a file of another form, naming the entry.
    """
    try:
        entries = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path} must hold a list of labelled texts")
    texts, labels = [], []
    for number, entry in enumerate(entries):
        try:
            text = entry["full_text"]
            own = [Span(s["entity_type"], int(s["start_position"]), int(s["end_position"])) for s in entry["spans"]]
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path}, entry {number}: expected full_text and spans with their positions") from None
        texts.append(text)
        labels.append(own)
    return texts, labels


def _overlap(stretch: tuple[int, int], others: Sequence[tuple[int, int]]) -> int:
    """Characters of ``stretch`` that lie in the union of ``others``."""
    start, end = stretch
    return sum(max(0, min(end, to) - max(start, since)) for since, to in merge(others))
