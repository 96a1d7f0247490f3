"""Mutation tests: apply each change of mutants.yaml to a copy of the tree and see whether the tests it names fail.

A change that survives needs a test, or a sentence under ``survives``. The exit status is 1 where a change has neither.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutants.yaml")
COPIED = ("fastdp", "kernels", "bench", "tests", "docs", "examples", "pyproject.toml", "README.md", "setup.py", "csrc")
#: Seconds that the tests of one change may take; one that makes them hang is caught.
LIMIT = 420
CAUGHT, SURVIVED, BROKEN = "caught", "survived", "broken"
#: What the processes of tests are forked with: these take longer to import than most tests to run.
LIBRARIES = ["torch", "transformers", "peft", "scipy.stats", "dp_accounting", "hypothesis", "pytest", "opacus", "typer"]
FORKS = multiprocessing.get_context("forkserver")
#: Triton reads TRITON_INTERPRET when it is imported, and the libraries above import it.
FRESH = multiprocessing.get_context("spawn")


class Mutant(NamedTuple):
    """One change: the text ``old``, which stands in ``file`` once, becomes ``new``, and ``tests`` should fail."""

    file: str
    old: str
    new: str
    tests: str
    survives: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())} -> {' '.join(self.new.split()) or '(nothing)'}"

    def applied(self) -> str:
        """The changed file. Raises ValueError unless the old text stands in it once."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"the old text stands in the file {text.count(self.old)} times: write this change anew")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """The committed list."""
    return [Mutant(**fields) for fields in yaml.safe_load(LIST.read_text(encoding="utf-8"))]


def copy_tree(folder: Path) -> Path:
    """A copy of the sources and tests, whose packages Python finds before the installed ones."""
    folder.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    for name in ("kernels", "bench"):
        (folder / "fastdp" / name).symlink_to(folder / name, target_is_directory=True)
    return folder


def run_pytest(folder: Path, tests: list[str], report: Path) -> None:
    """What a fork does: run tests in a copy of the tree until the first failure."""
    os.chdir(folder)
    os.environ["TRITON_INTERPRET"] = str(int("interpreted" in tests[0]))
    sys.path.insert(0, str(folder))
    output = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    _ = os.dup2(output, 1), os.dup2(output, 2)
    import pytest

    sys.exit(pytest.main(["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests]))


def outcome(folder: Path, tests: list[str]) -> tuple[str, str]:
    """What became of the change that a copy holds, and the test that failed."""
    report = folder / "report.txt"
    process = (FRESH if "interpreted" in tests[0] else FORKS).Process(target=run_pytest, args=(folder, tests, report))
    process.start()
    process.join(LIMIT)
    if process.exitcode is None:
        process.kill()
        return CAUGHT, f"no end within {LIMIT} s"
    if process.exitcode == 0:
        return SURVIVED, ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said := report.read_text(errors="replace"), re.MULTILINE)
    return (CAUGHT, failed[1]) if failed else (BROKEN, said.strip()[-300:])


def try_change(mutant: Mutant, copies: queue.Queue[Path]) -> dict[str, object]:
    """Apply one change to a copy that is free, run its tests, and the one that failed again without the change."""
    folder, begin = copies.get(), time.monotonic()
    path = folder / mutant.file
    before = path.read_bytes()
    try:
        path.write_text(mutant.applied(), encoding="utf-8")
        found, by = outcome(folder, mutant.tests.split())
        path.write_bytes(before)
        if "::" in by and outcome(folder, [by])[0] != SURVIVED:
            found, by = BROKEN, f"{by} fails without the change as well"
    except ValueError as error:
        found, by = BROKEN, str(error)
    finally:
        path.write_bytes(before)
        copies.put(folder)
    seconds = round(time.monotonic() - begin, 1)
    print(f"{found:8} {seconds:6.1f} s  {mutant.name}{f'  [{by}]' if by else ''}", flush=True)
    return {"change": mutant.name, "outcome": found, "by": by, "seconds": seconds, "survives": mutant.survives}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="Changes whose description matches this pattern.")
    parser.add_argument("--rest", action="store_true", help="Those that the file of results does not have as caught.")
    parser.add_argument("--jobs", type=int, default=2, help="Changes that are tried at the same time.")
    parser.add_argument("--json", type=Path, help="File of results; outcomes of changes that are not tried again stay.")
    options, known, bad = parser.parse_args(), {}, 0
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    FORKS.set_forkserver_preload(LIBRARIES)
    if options.json and options.json.exists():
        known = {row["change"]: row for row in json.loads(options.json.read_text())["changes"]}
    done = {name for name, row in known.items() if options.rest and row["outcome"] == CAUGHT}
    chosen = [mutant for mutant in mutants() if re.search(options.only, mutant.name) and mutant.name not in done]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(options.jobs):
            copies.put(copy_tree(Path(folder, str(number))))
        for row in pool.map(lambda mutant: try_change(mutant, copies), chosen):
            known[row["change"]] = row
            bad += row["outcome"] != CAUGHT and not row["survives"]
            if options.json:
                rows = [known[mutant.name] for mutant in mutants() if mutant.name in known]
                counts = dict(Counter(row["outcome"] for row in rows), listed=len(mutants()))
                options.json.write_text(json.dumps({"counts": counts, "changes": rows}, indent=1) + "\n")
    print(f"{len(chosen)} of {len(mutants())} changes were tried: {bad} are neither caught nor explained")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
