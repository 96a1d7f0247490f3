"""A ledger cut at the end of a line is taken for a whole one: releases that were made over those accounted for"""

import shutil
import tempfile
from pathlib import Path

from . import systems


def attack(fastdp: systems.FastDP) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        fastdp.go_on(folder, 5, resume=False)
        lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
        accounted, refusals = [], []
        for kept in range(1, len(lines)):
            cut = Path(name) / f"cut-{kept}"
            shutil.copytree(folder, cut)
            (cut / "ledger.jsonl").write_text("".join(lines[:kept]))
            try:
                accounted.append(fastdp.go_on(cut, 0, resume=True))
            except ValueError as error:
                refusals.append(error)
        if not accounted:
            raise refusals[-1]
        return 5 / min(accounted) if min(accounted) else float("inf")
