"""Beginning or continuing the ledger of a private run."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import fastdp.accounting as accounting
from fastdp.private.method import Budget, Method, Schedule


def fingerprint(parameters: dict[str, torch.nn.Parameter]) -> str:
    """A digest of the trained parameters' names and shapes, by which a checkpoint knows its model."""
    text = "\n".join(f"{name} {list(p.shape)}" for name, p in parameters.items())
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def opened_ledger(
    output_dir: str | os.PathLike[str] | None,
    resume: bool,
    settings: dict[str, Any],
    method: Method,
    schedule: Schedule,
    budget: Budget,
) -> Iterator[accounting.Ledger]:
    """The ledger of a run, new or continued, with the budgets that the method asks for.

    Should the block raise, the run has not begun: the ledger is closed, and a file that this call made is taken back.

    Raises ValueError for a folder in use, or a ledger that was written with other arguments, and LedgerError.
    """
    header = {
        "run_id": uuid.uuid4().hex,
        "mechanism": method.describe(),
        **{
            key: settings[key]
            for key in (
                "fingerprint",
                "unit",
                "adjacency",
                "sampling",
                "sample_rate",
                "dataset_size",
                "noise_multiplier",
            )
        },
    }
    path = None if output_dir is None else Path(output_dir) / "ledger.jsonl"
    continued = path is not None and path.exists()
    if path is not None and continued:
        ledger = _continued(path, resume)
    else:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        event = schedule.step(budget.noise_multiplier)
        ledger = accounting.Ledger.create(path, header, event=event, budget_steps=schedule.steps)
    try:
        if continued:
            _compare(ledger.header, header, f"the ledger in {output_dir}")
        for side in budget.side:
            ledger.declare(side.kind, side.event, side.count)
        yield ledger
    except BaseException:
        ledger.close()
        if path is not None and not continued:
            path.unlink()
        raise


def _continued(path: Path, resume: bool) -> accounting.Ledger:
    if not resume:
        raise ValueError(
            f"{path.parent} already holds a run's ledger; pass resume=True to continue it, or choose another folder"
        )
    return accounting.Ledger.open(path)


def _compare(written: dict[str, Any], header: dict[str, Any], name: str) -> None:
    """Raise ValueError where a run that is continued differs from the one that began: one card speaks for both."""
    # As the file holds them: tuples are lists there.
    given = json.loads(json.dumps(header))
    for key in given:
        if key != "run_id" and written.get(key) != given[key]:
            raise ValueError(f"{name} was written with another {key}; resume with the same arguments")
