"""What the utility suites and other long comparisons share: rows that are written as they come, so that a run that was
stopped goes on where it was, their options, seeds and figures, and the training loop.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import fastdp
import fastdp.files as files
from fastdp.commands.quiet import quiet_libraries
from fastdp.private.method import Method

from .. import record

#: A run: what identifies its row, and the function that measures the rest of it.
Run = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


class Table:
    """Rows in a JSON file beside their environment; the setting of a row identifies it."""

    def __init__(self, path: Path | None):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self.rows = json.loads(path.read_text())["figures"]

    def of(self, setting: dict[str, Any]) -> dict[str, Any] | None:
        """The row of this setting; None if it was not measured."""
        wanted = json.loads(json.dumps(setting))
        return next(those(self.rows, **wanted), None)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, on disk too."""
        self.rows.append(row)
        record.write(self.path, self.rows)


def measure(
    table: Table, runs: Iterable[Run], minutes: float = math.inf, shard: tuple[int, int] = (0, 1), skip: bool = False
) -> bool:
    """Measure what is missing, until the time is up; True if nothing is left.

    Args:
        table: gets the rows.
        runs: everything that is wanted.
        minutes: how long to go on.
        shard: (i, n) for run i, i + n, i + 2n, ... alone; processes with a table each share a suite by it.
        skip: whether a run that fails is reported and left out, or else ends the suite.
    """
    end = time.perf_counter() + 60 * minutes
    first, step = shard
    for setting, run in itertools.islice(runs, first, None, step):
        if table.of(setting):
            continue
        if time.perf_counter() >= end:
            print(f"stopped after {minutes:g} minutes; the same command goes on from here", flush=True)
            return False
        begin = time.perf_counter()
        try:
            row = {**setting, **run(), "seconds": time.perf_counter() - begin}
        except Exception:
            if not skip:
                raise
            print(f"failed: {json.dumps(setting)}\n{traceback.format_exc()}", flush=True)
            continue
        table.add(row)
        print(json.dumps(row), flush=True)
    return True


def each(rows: Iterable[dict[str, Any]], run: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[Run]:
    """The runs where one function measures every row from its setting."""
    return ((row, partial(run, row)) for row in rows)


def parser_of(doc: str | None, sizes: Mapping[str, Any], seeds: int = 3, **paths: str) -> argparse.ArgumentParser:
    """A suite's options: the paths that it cannot do without, with their help, and what all share.

    Args:
        doc: the suite's own docstring, whose first line describes it.
        sizes: what ``--size`` may be, and what `begin` makes of it.
        seeds: default of ``--seeds``.
    """
    parser = record.parser_of(str(doc).splitlines()[0])
    for name, text in paths.items():
        parser.add_argument(f"--{name}", type=Path, required=True, help=text)
    parser.add_argument("--pictures", type=Path, help="folder to draw into once all is measured")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to go on; the same command resumes")
    parser.add_argument(
        "--shard", type=_shard, default=(0, 1), help="I/N: only each N-th row from row I, counted from 0"
    )
    parser.add_argument("--skip-failures", action="store_true", help="report a row that fails, and go on")
    parser.add_argument("--size", choices=tuple(sizes), default="default")
    if "full" in sizes:
        parser.add_argument(
            "--full", dest="size", action="store_const", const="full", help="the paper's size, for a GPU"
        )
    parser.set_defaults(sizes=sizes)
    return parser


def _shard(text: str) -> tuple[int, int]:
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise argparse.ArgumentTypeError(f"{text} is not a shard: give I/N with I from 0 to N - 1, such as 0/4")
    return int(first), int(step)


def merge(path: Path, shards: Sequence[Path]) -> None:
    """Write the rows of several tables as one, with the environment that they were measured in.

    Raises ValueError for tables of different environments.
    """
    tables = [json.loads(shard.read_text()) for shard in shards]
    if any(table["environment"] != tables[0]["environment"] for table in tables):
        raise ValueError("these tables were measured in different environments: merge those of one machine and commit")
    rows = [row for table in tables for row in table["figures"]]
    once = [row for index, row in enumerate(rows) if row not in rows[:index]]
    files.write(
        path, json.dumps({"environment": tables[0]["environment"], "figures": once}, indent=1) + "\n", public=True
    )


def begin(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Any, Table]:
    """The options, the size that they ask for, and the rows that there are."""
    options = parser.parse_args(arguments)
    # The same public texts are drawn in every row of a table.
    os.environ["FASTDP_AGAIN"] = "1"
    quiet_libraries()
    return options, options.sizes[options.size], Table(options.json)


def finish(
    table: Table,
    wanted: Iterable[Run],
    options: argparse.Namespace,
    plot: Callable[[Sequence[dict[str, Any]], Path], None],
) -> None:
    """Measure what is missing, and draw once all is there."""
    done = measure(table, wanted, options.minutes, options.shard, options.skip_failures)
    if options.pictures and done:
        plot(table.rows, options.pictures)


def by_seed(rows: Sequence[dict[str, Any]], seeds: int) -> Iterator[dict[str, Any]]:
    """Each setting once a seed; the first seed of everything comes first."""
    once = [row for index, row in enumerate(rows) if row not in rows[:index]]
    return ({**row, "seed": seed} for seed in range(seeds) for row in once)


def interior(
    table: Table, rates: Sequence[float], run: Callable[[float], Run], value: str, *, largest: bool, most: int = 8
) -> Iterator[Run]:
    """A run at each learning rate, and on beyond the grid's edge, by its own steps, while the best lies there.

    Args:
        table: where the runs' rows are found once they were measured.
        rates: the grid, rising; at least two.
        run: the run at a rate.
        value: what is best if it is largest, or else smallest.
        most: rates that are tried at most.
    """
    tried = {rate: run(rate) for rate in rates}
    yield from tried.values()
    while len(tried) < most:
        found = {rate: mean_of(table.rows, value, **setting) for rate, (setting, _) in tried.items()}
        known = sorted(rate for rate, figure in found.items() if figure is not None)
        if len(known) < len(tried):
            return  # Time was up before all had been measured.
        best = (max if largest else min)(known, key=lambda rate: (found[rate], 0.0))
        if best not in (known[0], known[-1]):
            return
        rate = known[0] ** 2 / known[1] if best == known[0] else known[-1] ** 2 / known[-2]
        tried[rate] = run(rate)
        yield tried[rate]


def those(rows: Iterable[dict[str, Any]], /, **setting: Any) -> Iterator[dict[str, Any]]:
    """The rows with this setting."""
    return (row for row in rows if all(row.get(key) == wanted for key, wanted in setting.items()))


def spread_of(rows: Sequence[dict[str, Any]], value: str, **setting: Any) -> tuple[float, float] | None:
    """Mean and standard deviation of a value over the rows with this setting that have it; None without any."""
    found = [row[value] for row in those(rows, **setting) if row.get(value) is not None]
    return (statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0) if found else None


def mean_of(rows: Sequence[dict[str, Any]], value: str, **setting: Any) -> float | None:
    """The mean alone."""
    found = spread_of(rows, value, **setting)
    return found and found[0]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that a call took, and what it returned."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def curve(
    axes: Any, rows: Sequence[dict[str, Any]], value: str, over: str, at: Iterable[Any], label: str, **setting: Any
) -> None:
    """Mean and deviation of a value at each of ``at`` of the setting ``over`` that has rows."""
    found = [(place, spread_of(rows, value, **{**setting, over: place})) for place in at]
    points = [(place, *spread) for place, spread in found if spread]
    if points:
        axes.errorbar(*zip(*points), capsize=3, label=label)


def by_epsilon(axes: Any, epsilons: Sequence[float], value: str) -> None:
    """Axes of a value against the true epsilon, with a mark at each of these."""
    axes.set(xscale="log", xlabel="true epsilon", ylabel=value)
    axes.minorticks_off()
    axes.set_xticks(epsilons, [f"{e:g}" for e in epsilons])


def level(axes: Any, rows: Sequence[dict[str, Any]], value: str, label: str, **setting: Any) -> None:
    """A line at the mean of a value over the rows with this setting, if there are any."""
    mean = mean_of(rows, value, **setting)
    if mean is not None:
        axes.axhline(mean, color="grey", linestyle="--", label=label)


def device() -> torch.device:
    """Where everything is measured: a GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def placed(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch on that device."""
    return {key: value.to(device()) for key, value in batch.items()}


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """The model on that device, in training mode, with every dropout off: it would differ between the methods."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
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
        **options,
    )


def train(run: fastdp.Private) -> Iterator[int]:
    """Train until the budget is spent; yields the rows of each microbatch, after the step that it completes if it does."""
    while run.steps_done < run.total_steps:
        for batch in run.data_loader:
            run.model(**placed(batch)).loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            yield len(batch["labels"])


if __name__ == "__main__":
    merge(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
