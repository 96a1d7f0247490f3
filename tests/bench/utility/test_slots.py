"""A slot as a label: texts of one meaning lie in one file, and labels say what the meaning says."""

import re

import pytest
from fastdp.bench.utility import slots

from fastdp.data import read_rows


@pytest.fixture
def folder(tmp_path):
    values = ("yes", "yes", "no", "maybe", None)

    def line(number, value):
        slot = "" if value is None else f", familyFriendly[{value}]"
        return f'"name[Inn {number}]{slot}","Inn  {number} says {value}"'

    for name, first in (("train.csv", 0), ("test.csv", 40)):
        lines = [line(number // 2, values[number // 2 % 5]) for number in range(first, first + 40)]
        (tmp_path / name).write_text("mr,ref\n" + "\n".join(lines) + "\n")
    return tmp_path


def test_texts_keep_their_labels_and_meanings_stay_together(folder):
    slots.main(["--e2e", str(folder), "--output", str(folder / "made")])
    inns = {}
    for name in ("train.tsv", "dev.tsv", "test.tsv"):
        rows = read_rows(folder / "made" / name)
        for text, label in zip(rows.column("sentence", ""), rows.column("label", "")):
            number, value = re.fullmatch(r"Inn (\d+) says (\w+)", text).groups()
            assert label == {"yes": "1", "no": "0"}[value]
            inns.setdefault(name, []).append(number)
    assert len(inns["train.tsv"]) == len(inns["dev.tsv"] + inns["test.tsv"]) == 24
    assert not set(inns["dev.tsv"]) & set(inns["test.tsv"])


def test_a_slot_without_values_is_refused(folder):
    with pytest.raises(ValueError, match="no two values"):
        slots.split(folder, "food")
