"""The quickstart itself: one model and one set of records, fine-tuned without and with privacy, side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

import fastdp.files as files
from fastdp.finetune import ConfigError, FinetuneConfig, Reporter, Result, finetune
from fastdp.finetune.report import build_report
from fastdp.quickstart.corpus import private_records

HELD_OUT, RUN_BATCH = 400, 256
EPSILON, DELTA = 8.0, 1e-5
# One set of settings for both runs, so that nothing but privacy differs between them.
RUN_SETTINGS = {"epochs": 4, "batch_size": RUN_BATCH, "learning_rate": 8e-3, "schedule": "linear", "max_length": 80}

_BEGIN = (
    "This fine-tunes a small language model on {train} invented medical records, twice: without privacy, and with differential "
    "privacy at epsilon {epsilon:g}. It needs no network, and ends with a table of what privacy cost. Each run says first how "
    "long its steps will take."
)

_NEXT = """
What to try next:
  both runs on one page        {page}
  what was promised            {private}/card.md
  check that it holds          fastdp verify {private}
  what the model gives away    fastdp attack {private} --help
  your own model and data      fastdp finetune --help
  in your own training loop    fastdp.make_private, see README.md"""


def quickstart(output: Path, seed: int, console: Console, reporter: Callable[[str], Reporter], train: int) -> None:
    """Write ``train`` records, run both trainings and print the table.

    ``reporter`` makes the context manager that shows one run's progress, given a title.
    """
    begin = time.perf_counter()
    if (output / "train.jsonl").exists():
        raise ConfigError(f"{output} already holds a quickstart: remove it, or choose another with --output")
    if train < RUN_BATCH:
        raise ConfigError(f"{train} records are fewer than a batch of {RUN_BATCH}: give more")
    console.print(_BEGIN.format(train=train, epsilon=EPSILON))
    files.make_folder(output)
    records = private_records(train + min(HELD_OUT, train // 4), seed)
    for name, part in (("train", records[:train]), ("held_out", records[train:])):
        files.write_rows(output / f"{name}.jsonl", ({"text": record} for record in part))
    console.print(f"{train} records of people who do not exist, for example:")
    console.print(f"  {records[0]}", style="italic")
    with resources.as_file(resources.files(__package__) / "model") as model:
        results = {}
        for name, epsilon in (("without privacy", math.inf), (f"epsilon {EPSILON:g}", EPSILON)):
            config = FinetuneConfig(
                model=str(model),
                train=str(output / "train.jsonl"),
                eval=str(output / "held_out.jsonl"),
                output=str(output / name.replace(" ", "-")),
                epsilon=epsilon,
                delta=DELTA,
                physical_batch_size=64,
                eval_batch_size=64,
                seed=seed,
                **RUN_SETTINGS,  # type: ignore[arg-type]
            )
            with reporter(f"{name}: ") as progress:  # type: ignore[attr-defined]
                results[name] = finetune(config, reporter=progress)
    console.print(_table(results))
    runs = [Path(result.output) for result in results.values()]
    page = output / "report.html"
    files.write(page, build_report(runs))
    console.print(f"{time.perf_counter() - begin:.0f} s in all; written to {output}", soft_wrap=True)
    for line in _NEXT.format(page=page.resolve(), private=runs[-1]).splitlines():
        console.print(line, soft_wrap=True)


def _table(results: dict[str, Result]) -> Table:
    table = Table(title="Held-out records", title_justify="left")
    table.add_column("fine-tuning")
    for heading in ("perplexity", "epsilon spent", "s a step", "peak memory"):
        table.add_column(heading, justify="right")
    before = next(iter(results.values())).before
    assert before is not None
    table.add_row("none", f"{before.perplexity:.1f}", "0", "", "")
    for name, result in results.items():
        assert result.after is not None
        table.add_row(
            name,
            Text(f"{result.after.perplexity:.2f}", "bold"),
            f"{result.epsilon:.2f} (delta {result.delta:g})" if math.isfinite(result.epsilon) else "infinite",
            f"{result.seconds_per_step:.2f}",
            f"{result.peak_bytes / 2**20:.0f} MiB",
        )
    return table
