"""What `fastdp plan` foretells, and what the run of its settings then takes: seconds of all steps and peak memory.

    python -m fastdp.bench.plan --data shared/data --model shared/models/gpt2-mini --json bench/results/plan.json

Four examples of ours, cut short. Each plan and each run has a process of its own, so that neither's memory counts as the other's;
a file with rows is gone on with. Nothing else should run beside it. Ends with exit code 1 where a bar is not met.
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Any

from fastdp.data import read_rows
from fastdp.files import write_rows
from fastdp.finetune.config import FinetuneConfig

from .memory import process
from .record import parser_of
from .utility.suite import Table, each, measure

EXAMPLES, BATCH, PHYSICAL, EPOCHS = 384, 96, 32, 4
#: Training file below the data folder, and settings, by data set.
DATA: dict[str, tuple[str, dict[str, Any]]] = {
    "e2e": ("e2e/train.csv", {"prompt_column": "mr", "target_column": "ref", "max_length": 64}),
    "sst2": (
        "sst2/train.tsv",
        {
            "task": "classification",
            "text_column": "sentence",
            "label_column": "label",
            "labels": ["0", "1"],
            "max_length": 32,
        },
    ),
    "wikitext2": ("wikitext2/train.txt", {"max_length": 64}),
}
#: Data set, and what is trained.
CASES = (("e2e", "lora"), ("e2e", "full"), ("sst2", "lora"), ("wikitext2", "bitfit"))
#: How far seconds and memory may be from what was foretold, relatively.
BARS = {"seconds": 0.15, "bytes": 0.1}


def excerpt(path: Path, count: int, folder: Path) -> Path:
    """Write ``count`` examples, spread over a file that may be sorted, to a file of their own."""
    usable = [row for row in read_rows(path).rows if len(str(next(iter(row.values())))) > 20]
    written = folder / f"{path.parent.name}-{path.stem}.jsonl"
    write_rows(written, usable[:: max(1, len(usable) // count)][:count])
    return written


def settings(name: str, peft: str, model: str, data: Path, folder: Path) -> FinetuneConfig:
    """A run on an excerpt of a data set, which it writes to ``folder``; without held-out data, which no plan counts."""
    path, common = DATA[name]
    return FinetuneConfig(
        model=model,
        train=str(excerpt(data / path, EXAMPLES, folder)),
        output=str(folder / "run"),
        epsilon=8.0,
        delta=1e-4,
        epochs=float(EPOCHS),
        batch_size=BATCH,
        physical_batch_size=PHYSICAL,
        peft=peft,
        samples=0,
        **common,
    )


def foretold(config: FinetuneConfig) -> dict[str, Any]:
    """By the plan, for lengths that spread as the examples' do: the shortest, those at each tenth, and the longest."""
    import numpy

    from fastdp.finetune.machine import measure
    from fastdp.finetune.models import load_tokenizer, load_trained
    from fastdp.finetune.tasks import encode_rows

    tokenizer = load_tokenizer(config)
    lengths = encode_rows(read_rows(str(config.train)), tokenizer, config).lengths
    spread = [int(length) for length in numpy.quantile(lengths, numpy.linspace(0, 1, 11))]
    machine = measure(load_trained(config, tokenizer), tokenizer, config, spread)
    steps = EPOCHS * math.ceil(len(lengths) / config.batch_size)
    return {
        "seconds": machine.seconds(config.batch_size, steps),
        "bytes": machine.peak_bytes,
        "once_seconds": machine.once_seconds(config.batch_size, steps),
        "step_seconds": machine.step_seconds(config.batch_size),
        "steps": steps,
        "lengths": spread,
    }


def taken(config: FinetuneConfig) -> dict[str, float]:
    """By the run itself; its whole time besides, with loading, evaluation and writing, of which a plan says nothing."""
    from fastdp.finetune import finetune

    begin = time.perf_counter()
    result = finetune(config)
    whole = time.perf_counter() - begin
    seconds = result.seconds_per_step * result.steps
    return {"seconds": seconds, "bytes": result.peak_bytes, "steps": result.steps, "whole_seconds": whole}


def compare(name: str, peft: str, model: str, data: Path) -> dict[str, Any]:
    """What is measured of one case."""
    with tempfile.TemporaryDirectory() as folder:
        config = settings(name, peft, model, data, Path(folder))
        found = []
        for ask in (foretold, taken):
            with process({}) as alone:
                found.append(alone.submit(ask, config).result())
    plan, run = found
    off = {key: abs(plan[key] / run[key] - 1) for key in BARS}
    return {"foretold": plan, "taken": run, "off": off}


def main() -> None:
    """Measure what is missing, writing each row as it comes, and judge all."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with e2e/, sst2/ and wikitext2/")
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    table = Table(arguments.json)
    wanted = [{"data": name, "peft": peft} for name, peft in CASES]
    measure(table, each(wanted, lambda row: compare(row["data"], row["peft"], arguments.model, arguments.data)))
    failed = False
    for row in table.rows:
        missed = [key for key, bar in BARS.items() if row["off"][key] > bar]
        failed |= bool(missed)
        said = ", ".join(f"{key} {row['foretold'][key]:.3g} foretold, {row['taken'][key]:.3g} taken" for key in BARS)
        print(f"{row['data']} {row['peft']}: {said}" + (f"; MISSED: {', '.join(missed)}" if missed else ""), flush=True)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
