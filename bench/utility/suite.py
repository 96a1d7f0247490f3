"""What the utility suites share: their options, and the table that a stopped run goes on from."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdp.commands.quiet import quiet_libraries

from .. import record

Row = dict[str, Any]


class Table:
    """Rows in a JSON file beside their environment; the setting of a row identifies it."""

    def __init__(self, path: Path | None):
        self.path = path
        self.rows: list[Row] = []
        if path is not None and path.exists():
            self.rows = json.loads(path.read_text())["figures"]

    def has(self, setting: Row) -> bool:
        """Whether the row of this setting was measured."""
        wanted = json.loads(json.dumps(setting)).items()
        return any(all(row.get(key) == value for key, value in wanted) for row in self.rows)

    def add(self, row: Row) -> None:
        """Keep a row, on disk too."""
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
    parser.add_argument("--only", default="", help="only rows with a form or part whose name contains this")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit; the same command resumes")
    parser.add_argument("--size", choices=tuple(sizes), default="default")
    parser.add_argument("--full", dest="size", action="store_const", const="full", help="all rows, for a GPU")
    parser.set_defaults(sizes=sizes)
    return parser


def begin(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Any]:
    """The options, and the size that they ask for."""
    options = parser.parse_args(arguments)
    # The same public texts are drawn in every row of a table.
    os.environ["FASTDP_AGAIN"] = "1"
    quiet_libraries()
    return options, options.sizes[options.size]


def finish(options: argparse.Namespace, settings: Iterable[Row], run: Callable[[Row], Row]) -> None:
    """Measure what the options ask for and the file lacks."""
    names = ("part", "form", "scheme", "mechanism")
    wanted = (row for row in settings if options.only in " ".join(str(row.get(name, "")) for name in names))
    measure(Table(options.json), wanted, run, options.minutes)


def by_seed(rows: Sequence[Row], seeds: int) -> Iterator[Row]:
    """Each setting once a seed; the first seed of everything comes first."""
    once = [row for index, row in enumerate(rows) if row not in rows[:index]]
    return ({**row, "seed": seed} for seed in range(seeds) for row in once)
