"""What every result file says about where its figures come from."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import fastdp.files as files
from fastdp.distribution import installed_version, version_of

_PACKAGES = ("torch", "triton", "transformers", "peft", "opacus", "numpy")


def environment() -> dict[str, Any]:
    from fastdp import _native

    versions = {"fastdp": installed_version(), **{name: version_of(name) for name in _PACKAGES}}
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else _processor()
    return {
        "device": device,
        "instruction_set": _native.isa(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: found for name, found in versions.items() if found},
        "commit": _commit(),
    }


def write(path: str | os.PathLike[str] | None, figures: Any) -> None:
    """Write figures with their environment, in one piece; nothing without a path."""
    if path is not None:
        text = json.dumps({"environment": environment(), "figures": figures}, indent=1)
        files.write(path, text + "\n", public=True)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """The options of a script of this docstring: to begin with, where its figures are written."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here, with device, versions and commit")
    return parser


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    top, *lines = ["|" + "".join(f" {cell} |" if cell != "" else " |" for cell in row) for row in (head, *rows)]
    return [top, "|---" * len(head) + "|", *lines]


def with_table(text: str, table: str, name: str = "table") -> str:
    """A page's text with the table between its two marks replaced. Raises ValueError if the page has no such marks."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the page needs the lines '{begin}' and '{end}' once each: put them where the table belongs")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def insert(page: Path, table: str, name: str = "table") -> None:
    """Write a page with this table. Raises ValueError as `with_table` does."""
    page.write_text(with_table(page.read_text(), table, name))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str | None:
    """The source's commit, with a mark if the tree differs from it but in results; None outside a checkout."""
    root = Path(__file__).resolve().parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        status = ["git", "status", "--porcelain", "-uno", "--", ":/", ":!results"]
        changed = subprocess.run(status, cwd=root, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
