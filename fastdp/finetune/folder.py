"""The output folder of a run: what stands in it, whether a run may begin or go on there, and what of a stopped one is kept."""

from __future__ import annotations

import dataclasses
import math
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch
import yaml

import fastdp.files as files
from fastdp.finetune.config import ConfigError, FinetuneConfig, load_config
from fastdp.finetune.evaluation import Quality
from fastdp.untrusted import open_regular, parse_json_object, parse_yaml, read_bytes

CONFIG, METRICS, RESULT, CHECKPOINT = "config.yaml", "metrics.jsonl", "result.json", "checkpoint.pt"
LEDGER, PERTURBATION, SAMPLES = "ledger.jsonl", "perturbation.pt", "samples.json"
#: Under this name the ledger keeps a digest of the examples.
DATA = "data"
#: What else a run writes to its output.
_WRITTEN = (
    *("adapter", "model", "releases", "card.json", "card.md", "statement.json", "statement.md"),
    *(SAMPLES, PERTURBATION, CHECKPOINT),
)


@dataclass(frozen=True)
class Result:
    """What a run came to; `before` and `after` are None without held-out data."""

    output: str
    epsilon: float
    delta: float
    noise_multiplier: float
    steps: int
    trained_parameters: int
    seconds_per_step: float
    peak_bytes: int
    before: Quality | None
    after: Quality | None
    #: What a local method says of its privacy, in a sentence; or why a method as its paper prints it guarantees nothing.
    privacy: str | None = None
    #: What the user was told of the data, and of what went otherwise than asked.
    notes: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        """Write as JSON; an infinite epsilon is written as the text "inf"."""
        values = dataclasses.asdict(self) | {
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else "inf",
            "noise_multiplier": None if math.isnan(self.noise_multiplier) else self.noise_multiplier,
            "before": self.before and self.before.as_dict(),
            "after": self.after and self.after.as_dict(),
        }
        files.write_json(path, values)


def check_output(output: Path, config: FinetuneConfig, resume: bool) -> None:
    """Raise ConfigError unless a run may begin in this folder or, with ``resume``, go on there."""
    there = next(place for place in (output, *output.absolute().parents) if place.exists() or place.is_symlink())
    if not there.is_dir():
        raise ConfigError(f"output {output}: {there} is a file and not a folder: name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"output {output}: nothing can be written to {there}: choose another folder, or change its mode"
        )
    if not resume:
        held = next((name for name in (CONFIG, LEDGER, METRICS, RESULT) if (output / name).exists()), None)
        if held:
            raise ConfigError(f"{output} already holds a run ({held}): choose another output, or pass --resume")
        foreign = next((name for name in _WRITTEN if (output / name).exists()), None)
        if foreign:
            raise ConfigError(
                f"{output} holds {foreign}, which the run would overwrite: choose another output, or move it"
            )
        return
    if not (output / CONFIG).exists():
        raise ConfigError(f"there is no run to resume in {output}")
    if (output / RESULT).exists():
        raise ConfigError(f"the run in {output} is finished: there is nothing to resume")
    earlier = dataclasses.asdict(load_config(output / CONFIG))
    now = parse_yaml(yaml.safe_dump(dataclasses.asdict(config)))
    # A folder has many names; whether it is the run's own, its ledger knows.
    changed = [name for name, value in now.items() if name not in ("device", "output") and value != earlier[name]]
    if changed:
        raise ConfigError(f"a resumed run keeps its settings, but these differ: {', '.join(changed)}")


def _check_sums(file: IO[bytes]) -> None:
    """Raise ValueError for a file of torch whose checksums do not hold: torch writes them, and does not read them."""
    try:
        with zipfile.ZipFile(file) as archive:
            broken = archive.testzip()
    # A flipped bit may name a compression that zipfile does not know, which is its NotImplementedError.
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, OSError) as error:
        raise ValueError(str(error)) from None
    if broken is not None:
        raise ValueError(f"{broken} was altered")
    file.seek(0)


def read_checkpoint(output: Path) -> dict[str, Any] | None:
    """What an interrupted run had come to; None if it had not come that far. Raises ConfigError if it is damaged."""
    path = output / CHECKPOINT
    if not path.exists():
        return None
    try:
        with open_regular(path) as file:
            _check_sums(file)
            return torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, KeyError, UnpicklingError):
        raise ConfigError(
            f"{path} is damaged: remove it, and --resume trains anew with what is left of the budget, since what was spent "
            "stays spent"
        ) from None


def keep_metrics(output: Path, updates: int) -> None:
    """Drop the rows of updates that were lost with the process: they will be made again."""
    path = output / METRICS
    if not path.exists():
        return
    kept = []
    for line in read_bytes(path).decode(errors="replace").splitlines():
        try:
            row = parse_json_object(line)
        except ValueError:
            continue
        if isinstance(step := row.get("step"), int) and step <= updates and "unprotected" in row:
            kept.append(line + "\n")
    files.write(path, "".join(kept))
