"""What rows of `fastdp synthesize` teach a classifier on SST-2, beside as many private rows and rows of the public model.

    python -m bench.utility.synthesis --rows FOLDER --encoder MODEL --train train.tsv --test test.tsv --json synthesis.json

The folder has a file TUNING-EPSILON-SEED.jsonl for each run of ``examples/sst2_rows.yaml``, its card as .card.json beside it,
and public.jsonl, which the model wrote before it was tuned. As many rows of each label of every source are judged. Near-copies
share 8 words in a row with a private row; they are counted among all rows of a file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fastdp.accounting import Card
from fastdp.data import read_rows
from fastdp.finetune.synthesis import Judge, Labelled, near_copies

from . import suite

LENGTH = 64
#: Rows of each label that are judged.
SIZES = {"default": 2000, "tiny": 16, "full": 2000}


class Bench:
    """The judge, and the files of rows.

    Args:
        rows: folder of JSONL files.
        encoder: folder of a public encoder.
        train, test: TSV files with the columns ``sentence`` and ``label``.
        size: rows of each label that are judged.
    """

    def __init__(self, rows: Path, encoder: Path, train: Path, test: Path, size: int):
        self.folder, self.size = rows, size
        self.train, self.judge = labelled(train), Judge(encoder, labelled(test), LENGTH)

    def of_run(self, row: dict[str, Any]) -> dict[str, Any]:
        """Rows of a private run."""
        name = f"{row['tuning']}-{row['epsilon']:g}-{row['seed']}"
        return {
            **self.of_file(self.folder / f"{name}.jsonl"),
            **stated_settings(Card.load(self.folder / f"{name}.card.json")),
        }

    def of_file(self, path: Path) -> dict[str, Any]:
        """Rows of a file."""
        texts, labels = labelled(path)
        words = sum(len(text.split()) for text in texts) / len(texts)
        near = near_copies(texts, self.train[0])
        found = self.judged((texts, labels), range(len(texts)))
        return {**found, "rows": len(texts), "words": words, "near_copies": len(near)}

    def run(self, row: suite.Row) -> suite.Row:
        """What a row's source gives."""
        if row["source"] == "synthetic":
            return self.of_run(row)
        return self.of_private(row) if row["source"] == "private" else self.of_file(self.folder / "public.jsonl")

    def of_private(self, row: dict[str, Any]) -> dict[str, Any]:
        """Private rows, drawn by the seed."""
        generator = torch.Generator().manual_seed(row["seed"])
        return self.judged(self.train, torch.randperm(len(self.train[0]), generator=generator).tolist())

    def judged(self, rows: Labelled, order: Sequence[int]) -> dict[str, Any]:
        """Accuracy of the first rows of each label in this order."""
        texts, labels = rows
        every = [[i for i in order if labels[i] == label][: self.size] for label in sorted(set(labels))]
        chosen = [*itertools.chain.from_iterable(every)]
        accuracy = self.judge.accuracy(([texts[i] for i in chosen], [labels[i] for i in chosen]))
        return {"judged": len(chosen), "accuracy": accuracy}


def stated_settings(card: Card) -> dict[str, Any]:
    """What a card says of a run's settings."""
    found = {name: card[name] for name in ("noise_multiplier", "sample_rate", "dataset_size")}
    found |= {"true_epsilon": card["epsilon"]["upper_bound"], "delta": card["epsilon"]["delta"]}
    return {**found, "steps": card["steps"]["spent"], "trained_parameters": card["model"]["trained_parameters"]}


def labelled(path: Path) -> Labelled:
    """The texts and labels of a file."""
    table = read_rows(path)
    return table.column("sentence", "text"), table.column("label", "label")


def settings(bench: Bench, seeds: int) -> Iterator[suite.Row]:
    """Every file of the folder, then private rows."""
    for path in sorted(bench.folder.glob("[!.]*-*-*.jsonl")):
        tuning, epsilon, seed = path.stem.split("-")
        yield {"source": "synthetic", "tuning": tuning, "epsilon": float(epsilon), "seed": int(seed)}
    if (bench.folder / "public.jsonl").exists():
        yield {"source": "public model"}
    yield from ({"source": "private", "seed": number} for number in range(seeds))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing."""
    paths = {
        "rows": "folder of JSONL files",
        "encoder": "folder of a public encoder",
        "train": "TSV with the columns sentence and label",
        "test": "TSV of the same form, held out",
    }
    suite.main(arguments, __doc__, SIZES, Bench, settings, paths)


if __name__ == "__main__":
    main()
