"""Groups of processes that several files of tests look at; the program is `ranked.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

Found = Mapping[str, Any]


def run(folder: Path, *groups: str, **environment: str) -> None:
    """Let the program run these groups of processes, one after another."""
    command = [sys.executable, "-m", "tests.private.ranked", str(folder), *groups]
    own = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(command, env=own, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr


def ranks(folder: Path, scenario: str, size: int) -> list[Found]:
    """What each rank of a group found."""
    return [torch.load(folder / f"{scenario}-{size}-{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Groups of one and of two processes, whose parent imports everything once; made once for all of xdist's workers."""
    from tests.private.ranked import MOMENTS

    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks"
    with FileLock(f"{place}.lock"):
        if not place.exists():
            making = base / "making"
            making.mkdir()
            run(
                making,
                *("matrix:1", "matrix:2", "sharded:2", "refusals:2", "shapes:1", "shapes:2"),
                *("pieces refused:2", "measured:2", "noise:2"),
                *("fused:1", "fused:2", "quantised:1", "quantised:2", "looked:2"),
                *(f"{moment}:{size}" for moment in (MOMENTS[1], f"{MOMENTS[-1]}, of pieces") for size in (2, 1)),
                *("crashes:1", "ends:1", "ends:2"),
                CASES="tied gpt2,users,selected anew",
                SHARDED="tied gpt2,selected anew",
            )
            making.rename(place)
    return place
