"""Rows of a utility benchmark: written as they come, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

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

    def has(self, setting: dict[str, Any]) -> bool:
        """Whether this setting was measured."""
        wanted = json.loads(json.dumps(setting))
        return any(all(row.get(key) == value for key, value in wanted.items()) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, on disk too."""
        self.rows.append(row)
        if self.path is not None:
            record.write(self.path, self.rows)


def measure(table: Table, runs: Iterable[Run], minutes: float) -> bool:
    """Measure what is missing, until the time is up; True if nothing is left."""
    end = time.perf_counter() + 60 * minutes
    for setting, run in runs:
        if table.has(setting):
            continue
        if time.perf_counter() >= end:
            print(f"stopped after {minutes:g} minutes; the same command goes on from here", flush=True)
            return False
        begin = time.perf_counter()
        row = {**setting, **run(), "seconds": time.perf_counter() - begin}
        table.add(row)
        print(json.dumps(row), flush=True)
    return True


def measure_rows(
    table: Table, rows: Iterable[dict[str, Any]], run: Callable[[dict[str, Any]], dict[str, Any]], minutes: float
) -> bool:
    """As `measure`, where one function measures every row from its setting."""
    return measure(table, ((row, partial(run, row)) for row in rows), minutes)


def add_options(parser: argparse.ArgumentParser, seeds: int = 3) -> None:
    """The options that suites share; ``seeds`` is the default of one."""
    parser.add_argument("--json", type=Path, help="rows as they come, with device, versions and commit")
    parser.add_argument("--pictures", type=Path, help="folder to draw into once all is measured")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to go on; the same command resumes")
    parser.add_argument("--size", choices=("default", "tiny", "full"), default="default")
    parser.add_argument("--full", dest="size", action="store_const", const="full", help="the paper's size, for a GPU")


def mean_of(rows: list[dict[str, Any]], value: str, **setting: Any) -> float | None:
    """Mean of a value over the rows with this setting; None without any."""
    found = [
        row[value] for row in rows if all(row.get(k) == v for k, v in setting.items()) and row.get(value) is not None
    ]
    return sum(found) / len(found) if found else None
