"""Beginning or continuing the ledger of a private run."""

from __future__ import annotations

import hashlib
import os
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

    Raises as `Ledger.open_or_create`.
    """
    header = {
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
    ledger = accounting.Ledger.open_or_create(
        path,
        header,
        event=schedule.step(budget.noise_multiplier),
        budget_steps=schedule.steps,
        side={side.kind: (side.event, side.count) for side in budget.side},
        resume=resume,
    )
    try:
        yield ledger
    except BaseException:
        ledger.abandon()
        raise
