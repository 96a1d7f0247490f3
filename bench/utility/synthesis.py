"""What rows of `fastdp synthesize` teach a classifier on SST-2, beside as many private rows and rows of the public model.

    python -m bench.utility.synthesis --rows FOLDER --encoder MODEL --train train.tsv --test test.tsv --json synthesis.json

The folder has a file TUNING-EPSILON-SEED.jsonl for each run of ``examples/sst2_rows.yaml``, its card as .card.json beside it,
and public.jsonl, which the model wrote before it was tuned. Near-copies share 8 words in a row with a private row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastdp.accounting import Card
from fastdp.data import read_rows
from fastdp.finetune.synthesis import Judge, near_copies

from .. import record
from . import suite

LENGTH = 64

#: Texts and their labels.
Labelled = tuple[list[str], list[str]]


class Bench:
    """The judge, and the files of rows.

    Args:
        encoder: folder of a public encoder.
        rows: folder of JSONL files.
        train, test: TSV files with the columns ``sentence`` and ``label``.
    """

    def __init__(self, encoder: Path, rows: Path, train: Path, test: Path):
        self.folder, self.judge = rows, Judge(encoder, LENGTH)
        self.train, self.test = labelled(train), labelled(test)

    def of_run(self, row: dict[str, Any]) -> dict[str, Any]:
        """Rows of a private run."""
        name = f"{row['tuning']}-{row['epsilon']:g}-{row['seed']}"
        card = Card.load(self.folder / f"{name}.card.json")
        return {**self._judged(labelled(self.folder / f"{name}.jsonl")), "true_epsilon": card["epsilon"]["upper_bound"]}

    def of_public_model(self) -> dict[str, Any]:
        """Rows that the model wrote before it was tuned, by prompts that mean nothing to it."""
        return self._judged(labelled(self.folder / "public.jsonl"))

    def of_private(self, row: dict[str, Any]) -> dict[str, Any]:
        """As many private rows, drawn by the seed."""
        generator = torch.Generator().manual_seed(row["seed"])
        chosen = torch.randperm(len(self.train[0]), generator=generator)[: row["rows"]].tolist()
        texts, labels = ([column[i] for i in chosen] for column in self.train)
        return {"accuracy": self.judge.accuracy((texts, labels), self.test)}

    def _judged(self, rows: Labelled) -> dict[str, Any]:
        near = near_copies(rows[0], self.train[0])
        return {"accuracy": self.judge.accuracy(rows, self.test), "rows": len(rows[0]), "near_copies": len(near)}


def labelled(path: Path) -> Labelled:
    """The texts and labels of a file."""
    table = read_rows(path)
    return table.column("sentence", "text"), table.column("label", "label")


def runs(bench: Bench, seeds: int) -> Iterator[suite.Run]:
    """Every file of the folder, then private rows."""
    for path in sorted(bench.folder.glob("[!.]*-*-*.jsonl")):
        tuning, epsilon, seed = path.stem.split("-")
        row: dict[str, Any] = {"source": "synthetic", "tuning": tuning, "epsilon": float(epsilon), "seed": int(seed)}
        yield row, partial(bench.of_run, row)
    if (bench.folder / "public.jsonl").exists():
        yield {"source": "public model"}, bench.of_public_model
    for number in range(seeds):
        row = {"source": "private", "rows": 4000, "seed": number}
        yield row, partial(bench.of_private, row)


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge what is missing."""
    parser = record.parser_of(str(__doc__).splitlines()[0])
    for name in ("rows", "encoder", "train", "test"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    bench = Bench(options.encoder, options.rows, options.train, options.test)
    suite.measure(suite.Table(options.json), runs(bench, options.seeds))


if __name__ == "__main__":
    main()
