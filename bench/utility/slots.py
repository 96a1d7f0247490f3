"""A slot of E2E's meanings as the label of its reference text, in the files and columns of SST-2: a second data set.

    python -m fastdp.bench.utility.slots --e2e FOLDER --slot familyFriendly --output FOLDER

``train.tsv`` is of E2E's ``train.csv``. Of ``test.csv``, which has other meanings, two thirds of the meanings go to ``dev.tsv``,
which counts as public, and the rest to ``test.tsv``. Texts whose meaning leaves the slot open, or has a rarer value than two
others, are left out.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fastdp import files
from fastdp.data import read_rows


class Text(NamedTuple):
    """A reference text, its meaning, and the value that the meaning gives the slot."""

    meaning: str
    text: str
    value: str


def read(path: Path, slot: str) -> list[Text]:
    """The texts of a file whose meanings fill the slot."""
    rows = read_rows(path)
    pairs = zip(rows.column("mr", "meanings"), rows.column("ref", "references"))
    found = ((meaning, text, re.search(re.escape(slot) + r"\[([^\]]*)\]", meaning)) for meaning, text in pairs)
    return [Text(meaning, " ".join(text.split()), value[1]) for meaning, text, value in found if value]


def split(folder: Path, slot: str) -> dict[str, list[tuple[str, int]]]:
    """Texts and labels by file, in an order of their own: 1 for the value that most training texts have, 0 for the next.

    Raises ValueError for a slot with fewer than two values.
    """
    train, others = (read(folder / name, slot) for name in ("train.csv", "test.csv"))
    common = [value for value, _ in Counter(text.value for text in train).most_common(2)]
    if len(common) < 2:
        raise ValueError(f"the slot '{slot}' has no two values in {folder / 'train.csv'}")
    shuffled = random.Random(0)
    meanings = sorted({text.meaning for text in others})
    shuffled.shuffle(meanings)
    held_out = set(meanings[: len(meanings) // 3])
    parts = {
        "train.tsv": train,
        "dev.tsv": [text for text in others if text.meaning not in held_out],
        "test.tsv": [text for text in others if text.meaning in held_out],
    }
    found = {
        name: [(own.text, 1 - common.index(own.value)) for own in part if own.value in common]
        for name, part in parts.items()
    }
    for part in found.values():
        shuffled.shuffle(part)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--e2e", type=Path, required=True, help="folder with E2E's train.csv and test.csv")
    parser.add_argument("--slot", default="familyFriendly")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, part in split(options.e2e, options.slot).items():
        lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in part)]
        files.write(options.output / name, "\n".join(lines) + "\n", public=True)
        print(f"{name}: {len(part)} texts, {sum(label for _, label in part) / len(part):.1%} of class 1")


if __name__ == "__main__":
    main()
