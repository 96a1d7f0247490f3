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

_PATHS = ("model", "train", "eval", "output", "public", "data")
_STATED = ("guarantee", "bound", "displacement", "epsilon", "sample_rate", "steps", "dataset_size")


def _without_folders(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the names of files in place of their paths, in mappings within them too."""
    kept: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            kept[name] = _without_folders(value)
        else:
            kept[name] = Path(value).name if name in _PATHS and value else value
    return kept


def gather(folder: Path) -> dict[str, Any]:
    """Settings, figures and statement of one finished run.

    Raises FileNotFoundError for a folder without one.
    """
    settings = _without_folders(yaml.safe_load((folder / "config.yaml").read_text()))
    figures = json.loads((folder / "result.json").read_text())
    figures.pop("output", None)
    # SAP's guarantee is no epsilon, and stands in a statement.
    card = folder / "card.json"
    stated = json.loads((card if card.exists() else folder / "statement.json").read_text())
    return {
        "run": folder.name,
        "settings": settings,
        "figures": figures,
        "card": {name: stated[name] for name in _STATED if name in stated},
    }


if __name__ == "__main__":
    target, *folders = sys.argv[1:]
    record.write(target, [gather(Path(folder)) for folder in folders])
