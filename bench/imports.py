"""Seconds of processor time that commands and imports take in a fresh process, beside Python's own start."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

_PLAN = ["--examples", "67349", "--batch-size", "32", "--epochs", "3"]
_COMMANDS = {
    "fastdp --help": ["-m", "fastdp", "--help"],
    "fastdp epsilon": ["-m", "fastdp", "epsilon", "--noise-multiplier", "0.5", *_PLAN],
    "fastdp calibrate": ["-m", "fastdp", "calibrate", "--epsilon", "8", *_PLAN],
    "import torch": ["-c", "import torch"],
    "import fastdp": ["-c", "import fastdp"],
    "from fastdp import make_private": ["-c", "from fastdp import make_private"],
}


def measure(turns: int = 5) -> list[dict[str, Any]]:
    """A row a command, the least of ``turns``: ``seconds`` beside those of a Python that does nothing."""
    nothing = min(_seconds(["-c", "pass"]) for _ in range(turns))
    return [
        {"command": name, "seconds": round(min(_seconds(arguments) for _ in range(turns)) - nothing, 3)}
        for name, arguments in _COMMANDS.items()
    ]


def _seconds(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
