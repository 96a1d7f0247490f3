"""Run the attacks, and draw their table."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..record import markdown
from . import data, files, leaks, mistakes
from .kit import ATTACKS, Attack, Library, is_refusal

#: Rounding of float32 in sums of at most 64 clipped records, which the bound of one record does not hold.
ROUNDING = 1e-4
#: Kinds of attacks: their module, and the heading of their rows.
KINDS = {
    "data": (data, "Hostile data"),
    "mistakes": (mistakes, "Honest mistakes and stock behaviour"),
    "files": (files, "Files, ledgers, cards and networks"),
    "leaks": (leaks, 'Code written to leak, with `isolation="per_example"`'),
}


def run(attack: Attack, *, unprotected: bool = False) -> dict[str, Any]:
    """Run one attack, with the protection or without.

    Returns ``verdict``: "moved", "refused", or "crashed" for an error that the library did not raise itself; ``moved``, in
    units of what is allowed, if something was released; and ``said``, the refusal or error.
    """
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")
            if unprotected:
                stack.enter_context(attack.unprotected())
            moved = float(attack.run(Library(**(attack.unmode if unprotected else attack.mode))))
    except Exception as error:
        # Where an object lies in memory, or a file in a temporary folder, would differ each time.
        said = re.sub(r" at 0x[0-9a-f]+|/tmp/\S*/|/tmp/(?=\w)", "", " ".join(str(error).split()))[:300]
        said = re.sub(r"\btmp\w{8}\b", "a folder", said)
        return {"verdict": "refused" if is_refusal(error) else "crashed", "said": f"{type(error).__name__}: {said}"}
    return {"verdict": "moved", "moved": moved if math.isfinite(moved) else "inf"}


def is_held(outcome: Mapping[str, Any]) -> bool:
    """Whether the attack failed: it was refused, or moved no more than the bound and its rounding."""
    return outcome["verdict"] == "refused" or float(outcome.get("moved", math.inf)) <= 1 + ROUNDING


def measure(only: str | None = None) -> Iterator[dict[str, Any]]:
    for name, attack in ATTACKS.items():
        if not only or only in name:
            yield {"attack": name, "kind": attack.kind, "shows": attack.shows, **run(attack)}


def merged(path: Path | None, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The latest row of each attack: those of a result file, if there is one, and these."""
    before = json.loads(path.read_text())["figures"]["attacks"] if path is not None and path.exists() else []
    latest = {row["attack"]: row for row in (*before, *rows)}
    return [latest[name] for name in ATTACKS if name in latest]


def cell(row: Mapping[str, Any]) -> str:
    if "moved" not in row:
        return str(row["verdict"])
    value = float(row["moved"])
    return "without bound" if math.isinf(value) else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    classes = []
    for kind, own in by_kind.items():
        refused = sum(row["verdict"] == "refused" for row in own)
        classes.append([KINDS[kind][1], len(own), refused, sum(map(is_held, own)) - refused])
    lines = markdown(["class", "attacks", "refused", "at most 1.00"], classes)
    for kind, own in by_kind.items():
        each = markdown(["attack", "outcome"], ([f"`{row['attack']}`", cell(row)] for row in own))
        lines += ["", f"**{KINDS[kind][1]}**", "", *each]
    return "\n".join(lines) + "\n"
