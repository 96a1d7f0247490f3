"""What a detector finds and what it misses, measured on labelled text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdp.methods.selective.spans import PrivacyDetector, PrivacyPolicy, Span, merge
from fastdp.untrusted import parse_json, read_bytes


@dataclass(frozen=True)
class DetectorQuality:
    """What a detector, under a policy, did on labelled texts.

    Attributes:
        corpus: where the labels come from, for the card.
        span_miss_rate: share of labelled spans not covered whole: each leaves private text in the clear.
        character_miss_rate: share of labelled private characters left in the clear.
        by_entity: for each entity the number of ``labelled`` spans, and the shares of them covered whole (``recall``) and in
            part (``touched``), under whatever name. Also the number of ``reported`` spans, and the share of them that touch
            labelled text (``precision``). A share of nothing is None.
    """

    corpus: str
    texts: int
    span_miss_rate: float
    character_miss_rate: float
    by_entity: dict[str, dict[str, float | None]]


def measure_detector(
    detector: PrivacyDetector,
    texts: Sequence[str],
    labels: Sequence[Sequence[Span]],
    policy: PrivacyPolicy | None = None,
    corpus: str = "labelled spans given by the caller",
) -> DetectorQuality:
    """Compare a detector with labelled spans; only labels of entities that the policy calls private count."""
    policy = PrivacyPolicy() if policy is None else policy
    if len(texts) != len(labels):
        raise ValueError(f"{len(labels)} lists of labels were given for {len(texts)} texts: give one for each")
    private_labels = [[s for s in own if policy.entities is None or s.entity in policy.entities] for own in labels]
    if not any(private_labels):
        raise ValueError("no text carries a label that the policy calls private, so nothing can be measured")
    exact = PrivacyPolicy(policy.entities, whole_words=False)
    labelled, covered, touched, reported, correct = (Counter[str]() for _ in range(5))
    characters = missed = 0
    for text, own, found in zip(texts, private_labels, detector.detect(texts)):
        truth = exact.private(text, own)
        perturbed = policy.private(text, found)
        characters += sum(end - start for start, end in truth)
        missed += sum(end - start - _overlap((start, end), perturbed) for start, end in truth)
        for span in own:
            inside = _overlap((span.start, span.end), perturbed)
            labelled[span.entity] += 1
            covered[span.entity] += inside == span.end - span.start
            touched[span.entity] += inside > 0
        for span in found:
            if policy.private(text, [span]):
                reported[span.entity] += 1
                correct[span.entity] += _overlap((span.start, span.end), truth) > 0
    rows: dict[str, dict[str, float | None]] = {
        entity: {
            "labelled": labelled[entity],
            "recall": _share(covered[entity], labelled[entity]),
            "touched": _share(touched[entity], labelled[entity]),
            "reported": reported[entity],
            "precision": _share(correct[entity], reported[entity]),
        }
        for entity in sorted(labelled | reported)
    }
    spans = sum(labelled.values())
    return DetectorQuality(corpus, len(texts), 1 - sum(covered.values()) / spans, missed / characters, rows)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def read_labelled_spans(path: str | Path) -> tuple[list[str], list[list[Span]]]:
    """Texts and labels of a JSON file in the form of Presidio's synthetic data sets.

    It lists objects with ``full_text`` and ``spans``, each of an ``entity_type``, ``start_position`` and ``end_position``.
    """
    try:
        entries = parse_json(read_bytes(path))
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
