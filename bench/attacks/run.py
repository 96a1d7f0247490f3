"""Find the attacks, run them against every installed system, and draw the table."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.util
import io
import json
import math
import pkgutil
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .kit import NotApplicable, System

#: Float32 rounding of sums of at most 64 clipped records, which the bound of one record does not hold.
ROUNDING = 1e-4
_SHARED = {"kit", "run", "systems"}


def names() -> list[str]:
    """Every attack, in the order of the alphabet."""
    return sorted(name for _, name, _ in pkgutil.iter_modules([str(Path(__file__).parent)]) if name not in _SHARED)


def load(name: str) -> ModuleType:
    """The script of an attack."""
    return importlib.import_module(f"{__package__}.{name}")


def statement(script: ModuleType) -> str:
    """What the attack shows when it succeeds."""
    return (script.__doc__ or "").strip().splitlines()[0].rstrip(".")


def run(name: str, system: System) -> dict[str, Any]:
    """Run one attack against one system.

    Returns ``verdict``: "moved", "refused", "crashed" (stopped by an error that the system did not raise itself) or "n/a";
    ``moved`` in units of what the system allows, where something was released; and ``said``, the refusal or error.
    """
    script = load(name)
    # An attack on something that others do not have says so by the type of what it attacks.
    if not isinstance(system, next(iter(script.attack.__annotations__.values()))):
        return {"verdict": "n/a"}
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            moved = float(script.attack(system))
    except NotApplicable:
        return {"verdict": "n/a"}
    except Exception as error:
        return {"verdict": "refused" if _own(error, system) else "crashed", "said": _sentence(error)}
    return {"verdict": "moved", "moved": moved if math.isfinite(moved) else "inf"}


def _own(error: BaseException, system: Any) -> bool:
    """Whether the system refused: the error was raised by a statement of its own, not by something that it called."""
    spec = importlib.util.find_spec(system.module.partition(".")[0])
    assert spec is not None
    # What a backward pass raises is raised below torch's own frames.
    last = traceback.extract_tb(error.__traceback__)[-1]
    places = spec.submodule_search_locations or [str(spec.origin)]
    return (last.line or "").startswith("raise") and any(Path(last.filename).is_relative_to(place) for place in places)


def _sentence(error: BaseException) -> str:
    # Where an object lies in memory says nothing, and would differ each time.
    said = re.sub(r" at 0x[0-9a-f]+", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {said}"[:300]


def measure(systems: Sequence[System], only: str | None = None) -> Iterator[dict[str, Any]]:
    """A row an attack: what it shows, and what came of it on each system."""
    for name in names():
        if only and only not in name:
            continue
        outcomes = {system.name: run(name, system) for system in systems}
        yield {"attack": name, "shows": statement(load(name)), "outcomes": outcomes}


def held(outcome: dict[str, Any]) -> bool:
    """Whether the attack failed: it was refused, or moved no more than the bound and its rounding."""
    return outcome["verdict"] == "refused" or float(outcome.get("moved", math.inf)) <= 1 + ROUNDING


def cell(outcome: dict[str, Any]) -> str:
    """One outcome in a few characters."""
    if "moved" not in outcome:
        return outcome["verdict"]
    value = float(outcome["moved"])
    return "without bound" if math.isinf(value) else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def earlier(path: Path, systems: Sequence[System]) -> list[dict[str, Any]]:
    """The rows of a result file, if there is one, that stay where only some attacks are run.

    Raises ValueError for a file of other systems, or of other versions of theirs: one table would mix them.
    """
    if not path.exists():
        return []
    found = json.loads(path.read_text())["figures"]
    if found["systems"] != {system.name: system.version for system in systems}:
        raise ValueError(f"{path} is of {found['systems']}: run all attacks anew, or write to another file")
    return [row for row in found["attacks"] if row["attack"] in names()]


def merged(before: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The latest row of each attack, in the order of the alphabet."""
    latest = {row["attack"]: row for row in (*before, *rows)}
    return [latest[name] for name in sorted(latest)]


def figures(systems: Sequence[System], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the result file holds."""
    return {
        "date": datetime.date.today().isoformat(),
        "systems": {system.name: system.version for system in systems},
        "attacks": list(rows),
    }


def table(found: dict[str, Any]) -> str:
    """The table in Markdown, and the sentences of the refusals under it."""
    systems = list(found["systems"])
    heads = [f"{name} {found['systems'][name]}".strip() for name in systems]
    lines = [f"Measured on {found['date']}. 1.00 is what a system allows one record.", ""]
    lines += ["| attack | what it shows where it succeeds | " + " | ".join(heads) + " |"]
    lines += ["|---" * (2 + len(systems)) + "|"]
    for row in found["attacks"]:
        cells = [cell(row["outcomes"].get(name, {"verdict": "not run"})) for name in systems]
        lines.append(f"| `{row['attack']}` | {row['shows']} | {' | '.join(cells)} |")
    lines += ["", f"What {systems[0]} says where it refuses:", ""]
    for row in found["attacks"]:
        outcome = row["outcomes"][systems[0]]
        if outcome["verdict"] == "refused":
            said = outcome["said"].partition(": ")[2].replace("|", "\\|")
            lines.append(f"- `{row['attack']}`: {said}")
    return "\n".join(lines) + "\n"
