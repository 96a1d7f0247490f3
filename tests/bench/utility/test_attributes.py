"""Attributes of labelled texts are read as they are, and the attacker never sees a template that it attacks."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from fastdp.bench.utility import attributes

SPANS = {
    "Ann": "PERSON",
    "Oslo": "GPE",
    "12 High Street": "STREET_ADDRESS",
    "4111111111111111": "CREDIT_CARD",
    "mr": "TITLE",
}


def labelled(text, template):
    spans = [
        {"entity_type": entity, "start_position": text.find(value), "entity_value": value}
        for value, entity in SPANS.items()
        if value in text
    ]
    return {"full_text": text, "spans": spans[::-1], "template_id": template}


class Letters:
    """A tokenizer with a token a letter: the first one's code is the template's letter in these texts."""

    def __call__(self, texts, max_length, **_):
        ids = torch.zeros(len(texts), max_length, dtype=torch.int64)
        for row, text in enumerate(texts):
            kept = text[:max_length]
            ids[row, : len(kept)] = torch.tensor([ord(letter) for letter in kept])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@pytest.mark.parametrize(
    ("text", "person", "place", "first"),
    [
        ("Ann of Oslo", 1, 1, 0),
        ("12 High Street, says Ann", 1, 1, 1),
        ("Oslo", 0, 1, 2),
        ("pay 4111111111111111", 0, 0, 4),
        ("mr nobody", 0, 0, 5),
        ("nothing at all", 0, 0, 5),
    ],
)
def test_attributes_are_those_of_the_labels(text, person, place, first, tmp_path):
    file = tmp_path / "spans.json"
    file.write_text(json.dumps([labelled(text, template) for template in range(3)]))
    found = attributes.read_subjects(file, Letters(), 8, 3, seed=0)
    assert {name: int(value) for name, value in found.attacked_attributes.items()} == {
        "person": person,
        "place": place,
        "first_entity": first,
    }


def test_attacked_texts_come_from_templates_of_their_own(tmp_path):
    file = tmp_path / "spans.json"
    file.write_text(json.dumps([labelled(f"{chr(65 + template)} Ann", template) for template in range(9)] * 10))
    for seed in range(3):
        found = attributes.read_subjects(file, Letters(), 8, 45, seed)
        known, attacked = (set(texts.ids[:, 0].tolist()) for texts in (found.known, found.attacked))
        assert len(attacked) == 3
        assert not known & attacked
        assert (len(found.known.labels), len(found.attacked.labels)) == (30, 15)


def test_what_is_in_the_clear_is_inferred(tmp_path):
    file = tmp_path / "spans.json"
    texts = ("Ann went home", "they went to Oslo", "4111111111111111 it is")
    file.write_text(json.dumps([labelled(f"{n} {texts[n % 3]}", n) for n in range(90)]))
    subjects = attributes.read_subjects(file, Letters(), 40, 90, seed=0)
    clear = [
        torch.nn.functional.one_hot(values["first_entity"], 6).float()
        for values in (subjects.known_attributes, subjects.attacked_attributes)
    ]
    found = attributes.attack(subjects, *clear)
    for name in attributes.ATTRIBUTES:
        assert found[f"{name}_accuracy"] == 1
        assert found[f"{name}_EP"] == 0
        assert found[f"{name}_majority"] < 1
