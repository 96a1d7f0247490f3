"""Seconds of processor time that commands and imports take in a fresh process, beside Python's own start."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fastdp.accounting as accounting

_PLAN = ["--examples", "67349", "--batch-size", "32", "--epochs", "3"]
_COMMANDS = {
    "fastdp --help": ["-m", "fastdp", "--help"],
    "fastdp epsilon": ["-m", "fastdp", "epsilon", "--noise-multiplier", "0.5", *_PLAN],
    "fastdp calibrate": ["-m", "fastdp", "calibrate", "--epsilon", "8", *_PLAN],
    "fastdp verify": ["-m", "fastdp", "verify", "card.json"],
    "import torch": ["-c", "import torch"],
    "import fastdp": ["-c", "import fastdp"],
    "from fastdp import make_private": ["-c", "from fastdp import make_private"],
}


def measure(turns: int = 5) -> list[dict[str, Any]]:
    """A row a command, the least of ``turns``: ``seconds`` beside those of a Python that does nothing."""
    with tempfile.TemporaryDirectory() as folder:
        _card().save(Path(folder) / "card.json")
        nothing = min(_seconds(["-c", "pass"], folder) for _ in range(turns))
        return [
            {"command": name, "seconds": round(min(_seconds(arguments, folder) for _ in range(turns)) - nothing, 3)}
            for name, arguments in _COMMANDS.items()
        ]


def _card() -> accounting.Card:
    """The card of the run that the other commands plan."""
    rate, steps = 32 / 67349, 6315
    return accounting.Card.build(
        mechanism="dpsgd",
        unit="example",
        adjacency="add_remove",
        sampling="poisson",
        dataset_size=67349,
        noise_multiplier=0.5,
        event=accounting.dpsgd(0.5, rate, steps),
        delta=1e-5,
        planned_steps=steps,
        spent_steps=steps,
        noise_source={"key": "os.urandom"},
        model={"name": "none"},
        sample_rate=rate,
        cross_check=False,
    )


def _seconds(arguments: list[str], folder: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
