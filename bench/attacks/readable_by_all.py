"""Files of a private run that every user of the machine may read"""

import tempfile
from pathlib import Path

from . import systems


def attack(library: systems.FastDP) -> float:
    with tempfile.TemporaryDirectory() as name:
        library.go_on(Path(name), 2, resume=False)
        open_to_all = [path for path in Path(name).rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
        return float("inf") if open_to_all else 0.0
