"""What the utility suites share: their options, the table that a stopped run goes on from, and the training loop."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import fastdp
from fastdp.commands.refusal import quiet_libraries
from fastdp.private.method import Method

from .. import record
from ..models import turn_dropout_off

Row = dict[str, Any]


class Table:
    """Rows in a JSON file beside their environment; the setting of a row identifies it."""

    def __init__(self, path: Path | None):
        self.path = path
        self.rows: list[Row] = []
        if path is not None and path.exists():
            self.rows = json.loads(path.read_text())["figures"]

    def has(self, setting: Row) -> bool:
        wanted = json.loads(json.dumps(setting)).items()
        return any(all(row.get(key) == value for key, value in wanted) for row in self.rows)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        record.write(self.path, self.rows)


def measure(table: Table, settings: Iterable[Row], run: Callable[[Row], Row], minutes: float = math.inf) -> None:
    """Add the missing rows to the table until the time is up: each is a setting and what ``run`` measures of it."""
    end = time.perf_counter() + 60 * minutes
    for setting in settings:
        if table.has(setting):
            continue
        if time.perf_counter() >= end:
            print(f"stopped after {minutes:g} minutes; the same command goes on from here", flush=True)
            return
        begin = time.perf_counter()
        row = {**setting, **run(setting), "seconds": time.perf_counter() - begin}
        table.add(row)
        print(json.dumps(row), flush=True)


def main(
    doc: str | None,
    sizes: Mapping[str, Any],
    bench: Callable[..., Any],
    settings: Callable[[Any, int], Iterable[Row]],
    paths: Mapping[str, str],
    arguments: Sequence[str] | None = None,
    *,
    seeds: int = 3,
) -> None:
    """Measure what the options ask for and the file lacks.

    Args:
        doc: the suite's own docstring, whose first line describes it.
        sizes: what ``--size`` may be.
        bench: makes, of the paths and a size, what has a ``size`` and can ``run`` a row.
        settings: rows of a bench and a number of seeds.
        paths: options that the suite cannot do without, and their help.
        arguments: of the command line.
        seeds: default of ``--seeds``.
    """
    parser = record.parser_of(str(doc).splitlines()[0])
    for name, text in paths.items():
        parser.add_argument(f"--{name}", type=Path, required=True, help=text)
    parser.add_argument("--only", default="", help="only rows whose words contain one of these: typed 4,LoRA")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--first-seed", type=int, default=0, help="leave out the rows of smaller seeds")
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit; the same command resumes")
    parser.add_argument("--size", choices=tuple(sizes), default="default")
    options = parser.parse_args(arguments)
    # The same public texts are drawn in every row of a table.
    os.environ["FASTDP_AGAIN"] = "1"
    quiet_libraries()
    made = bench(*(getattr(options, name) for name in paths), sizes[options.size])
    names = ("part", "form", "scheme", "mechanism", "tuning", "clients", "data", "initialisation")
    rows = (row for row in settings(made, options.seeds) if row.get("seed", 0) >= options.first_seed)
    said = ((row, " ".join(str(row[name]) for name in names if name in row)) for row in rows)
    wanted = (row for row, text in said if any(part in text for part in options.only.split(",")))
    measure(Table(options.json), wanted, made.run, options.minutes)


def by_seed(rows: Sequence[Row], seeds: int) -> Iterator[Row]:
    """Each setting once a seed; the first seed of everything comes first."""
    once = [row for index, row in enumerate(rows) if row not in rows[:index]]
    return ({**row, "seed": seed} for seed in range(seeds) for row in once)


def device() -> torch.device:
    """Where everything is measured: a GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def placed(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.to(device()) for key, value in batch.items()}


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """The model on that device, in training mode, with every dropout off: it would differ between the methods."""
    turn_dropout_off(model)
    return model.to(device()).train()


def private_run(
    model: torch.nn.Module,
    data: Any,
    collate: Callable[..., Any],
    method: Method,
    *,
    rate: float,
    batch_size: int,
    steps: float,
    weight_decay: float = 0.0,
    **options: Any,
) -> fastdp.Private:
    """A run of so many steps by AdamW, not begun."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return fastdp.make_private(
        model,
        torch.optim.AdamW(trained, lr=rate, weight_decay=weight_decay),
        DataLoader(data, batch_size=batch_size, collate_fn=collate),
        method=method,
        # Half a step less is rounded up to a whole one, whatever the rounding of the quotient.
        epochs=(steps - 0.5) / math.ceil(len(data) / batch_size),
        # Rows are short: recording would take longer than it saves.
        capture=False,
        **options,
    )


def train(run: fastdp.Private) -> float:
    """Train until the budget is spent; returns the seconds that it took."""
    begin = time.perf_counter()
    while run.steps_done < run.total_steps:
        for batch in run.data_loader:
            run.model(**placed(batch)).loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    return time.perf_counter() - begin


def spent_epsilon(run: fastdp.Private, delta: float) -> float | str:
    """The true epsilon of a run, "inf" without privacy."""
    if isinstance(run.method, fastdp.NonPrivate):
        return "inf"
    epsilon = float(fastdp.accounting.epsilon(run.ledger.event(), delta))
    return epsilon if math.isfinite(epsilon) else "inf"
