"""What an attacker reads off released texts with labelled private spans: who or what they name.

The attacker knows the attributes of some texts and trains a linear classifier on their pooled releases (SAP, section 4.1).
The texts under attack are made from other templates than those. Empirical privacy is one minus the classifier's accuracy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastdp import audit

from . import tops

_PLACES = frozenset({"STREET_ADDRESS", "GPE"})
_KINDS = ("PERSON", "STREET_ADDRESS", "GPE", "ORGANIZATION", "CREDIT_CARD")

#: Attribute -> its value, counted from 0, for the labelled entities of a text in order.
ATTRIBUTES: Mapping[str, Callable[[list[str]], int]] = {
    "person": lambda entities: int("PERSON" in entities),
    "place": lambda entities: int(not _PLACES.isdisjoint(entities)),
    "first_entity": lambda entities: _KINDS.index(entities[0]) if set(entities[:1]) & set(_KINDS) else len(_KINDS),
}


@dataclass(frozen=True)
class Subjects:
    """Texts whose attributes the attacker knows, and those it attacks; attributes are int64 [N] by name."""

    known: tops.Texts
    attacked: tops.Texts
    known_attributes: dict[str, Tensor]
    attacked_attributes: dict[str, Tensor]


def read_subjects(path: Path, tokenizer: Any, length: int, count: int, seed: int) -> Subjects:
    """``count`` texts of a file of labelled spans, a third of the templates (and about as many texts) under attack."""
    texts = json.loads(path.read_text(encoding="utf-8"))
    generator = torch.Generator().manual_seed(seed)
    templates = sorted({text["template_id"] for text in texts})
    order = torch.randperm(len(templates), generator=generator).tolist()
    hidden = {templates[i] for i in order[: len(templates) // 3]}
    drawn = [texts[i] for i in torch.randperm(len(texts), generator=generator).tolist()]
    parts = [[text for text in drawn if (text["template_id"] in hidden) == attacked] for attacked in (False, True)]
    parts = [parts[0][: count - count // 3], parts[1][: count // 3]]
    encoded = [tops.encode([t["full_text"] for t in part], tokenizer, length, [0] * len(part)) for part in parts]
    attributes = [
        {name: torch.tensor([of(_entities(t)) for t in part]) for name, of in ATTRIBUTES.items()} for part in parts
    ]
    return Subjects(encoded[0], encoded[1], attributes[0], attributes[1])


def attack(subjects: Subjects, known: Tensor, attacked: Tensor, *, labels: int | None = None) -> dict[str, float]:
    """Accuracy, EP and the most frequent value's share of every attribute, for pooled releases [N, d].

    ``labels`` is of how many texts the attacker knows the attributes; by default of all.
    """
    found: dict[str, float] = {}
    for name in ATTRIBUTES:
        truth, values = subjects.attacked_attributes[name], subjects.known_attributes[name][:labels]
        result = audit.attribute_inference(known[:labels], values, attacked, truth, weight_decay=0.1)
        found[f"{name}_accuracy"] = result.accuracy
        found[f"{name}_majority"] = result.majority
        found[f"{name}_EP"] = result.empirical_privacy
    return found


def _entities(text: dict[str, Any]) -> list[str]:
    spans = sorted(text["spans"], key=lambda span: int(span["start_position"]))
    return [str(span["entity_type"]) for span in spans]
