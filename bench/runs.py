"""Gather finished runs of `fastdp finetune` into one result file: `python -m fastdp.bench.runs OUT.json RUN...`.

Of each run it keeps the settings, the figures and what its card states; the paths of model and data are cut to their names.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from . import record

_PATHS = ("model", "train", "eval", "output")
_STATED = ("guarantee", "epsilon", "sample_rate", "steps", "dataset_size")


def gather(folder: Path) -> dict[str, Any]:
    """Settings, figures and statement of one finished run.

    Raises FileNotFoundError for a folder without one.
    """
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    for name in _PATHS:
        if settings.get(name):
            settings[name] = Path(settings[name]).name
    figures = json.loads((folder / "result.json").read_text())
    figures.pop("output", None)
    card = json.loads((folder / "card.json").read_text())
    return {
        "run": folder.name,
        "settings": settings,
        "figures": figures,
        "card": {name: card[name] for name in _STATED},
    }


if __name__ == "__main__":
    target, *folders = sys.argv[1:]
    record.write(target, [gather(Path(folder)) for folder in folders])
