"""Runs over batch size, learning rate, rank and bound at two budgets: what the rules of `fastdp plan` are fitted on.

    python -m fastdp.bench.settings --data shared/data --model shared/models/gpt2-mini --json bench/results/settings.json

Small runs on purpose: they say which settings suit a noise-to-signal ratio, not how good a model gets. Each is a
run of `fastdp finetune` on the first examples of a data set, judged on held-out ones; a file with rows is gone on with.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastdp.data import read_rows
from fastdp.finetune import finetune
from fastdp.finetune.config import FinetuneConfig

from . import record

#: What a data set's run has in common; (train, eval) below the data folder.
DATA: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "e2e": (
        ("e2e/train.csv", "e2e/test.csv"),
        {"prompt_column": "mr", "target_column": "ref", "max_length": 64},
    ),
    "sst2": (
        ("sst2/train.tsv", "sst2/dev.tsv"),
        {
            "task": "classification",
            "text_column": "sentence",
            "label_column": "label",
            "labels": ["0", "1"],
            "max_length": 32,
        },
    ),
    # Nothing is fitted on this one: it tells whether the rules carry over.
    "wikitext2": (("wikitext2/train.txt", "wikitext2/valid.txt"), {"max_length": 64}),
}
FITTED = ("e2e", "sst2")
EXAMPLES, JUDGES, EPOCHS, DELTA = 384, 96, 3, 1e-4
EPSILONS = (8.0, 2.0)
BATCHES = (16, 64, 192)
RATES = (1e-3, 4e-3, 1.6e-2, 6.4e-2)
MIDDLE = {"batch_size": 64, "learning_rate": 4e-3, "lora_r": 8, "max_grad_norm": 1.0}


def grid(only: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Data set and settings of every run; the coarse grid of all before the finer questions of any."""
    names = FITTED if only is None else (only,)
    for epsilon, batch, rate, name in itertools.product(EPSILONS, BATCHES, RATES, names):
        yield name, {**MIDDLE, "epsilon": epsilon, "batch_size": batch, "learning_rate": rate}
    for epsilon, (setting, value), name in itertools.product(
        EPSILONS, (("lora_r", 2), ("lora_r", 32), ("max_grad_norm", 0.1), ("max_grad_norm", 10.0)), names
    ):
        yield name, {**MIDDLE, "epsilon": epsilon, setting: value}


def run(name: str, settings: dict[str, Any], model: str, data: Path, folder: Path) -> dict[str, Any]:
    """One run's row: settings, what it was judged, noise multiplier and steps."""
    paths, common = DATA[name]
    files = [excerpt(data / path, count, folder) for path, count in zip(paths, (EXAMPLES, JUDGES))]
    config = FinetuneConfig(
        model=model,
        train=str(files[0]),
        eval=str(files[1]),
        output=str(folder / "run"),
        delta=DELTA,
        epochs=EPOCHS,
        schedule="linear",
        physical_batch_size=32,
        samples=0,
        **common,
        **(settings | {"lora_alpha": 2.0 * settings["lora_r"]}),
    )
    begin = time.perf_counter()
    result = finetune(config)
    assert result.before is not None
    assert result.after is not None
    return {
        "data": name,
        **settings,
        "noise_multiplier": result.noise_multiplier,
        "steps": result.steps,
        "trained_parameters": result.trained_parameters,
        "loss_before": result.before.loss,
        "loss": result.after.loss,
        result.after.figure[0]: result.after.figure[1],
        "seconds": time.perf_counter() - begin,
    }


def excerpt(path: Path, count: int, folder: Path) -> Path:
    """The first examples of a data set, written to a file of their own."""
    table = read_rows(path)
    # Spread over the file, which may be sorted; long enough that a model has something to learn from.
    usable = [row for row in table.rows if len(str(next(iter(row.values())))) > 20]
    chosen = usable[:: max(1, len(usable) // count)][:count]
    written = folder / f"{path.parent.name}-{path.stem}.jsonl"
    written.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return written


def main() -> None:
    """Run what is missing, writing each row as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with e2e/, sst2/ and wikitext2/")
    parser.add_argument("--model", required=True)
    parser.add_argument("--only", choices=tuple(DATA), help="one data set (by default those that rules are fitted on)")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    rows = json.loads(arguments.json.read_text())["figures"] if arguments.json.exists() else []
    for name, settings in grid(arguments.only):
        if any(row["data"] == name and all(row[key] == value for key, value in settings.items()) for row in rows):
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run(name, settings, arguments.model, arguments.data, Path(folder)))
        record.write(arguments.json, rows)
        row = rows[-1]
        print(f"{len(rows)}: {name} {settings} loss {row['loss']:.4f} in {row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
