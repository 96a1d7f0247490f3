"""A run resumed where the ledger is gone starts to count anew: releases that were made over those accounted for"""

import tempfile
from pathlib import Path

from . import systems


def attack(fastdp: systems.FastDP) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fastdp.go_on(folder, 3, resume=False)
        (folder / "ledger.jsonl").unlink()
        accounted = fastdp.go_on(folder, 0, resume=True)
        return 3 / accounted if accounted else float("inf")
