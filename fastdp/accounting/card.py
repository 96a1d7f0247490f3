"""The card: what privacy a run bought, in a form that a machine can check and a person can read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fastdp.files as files
from fastdp.accounting.accountants import check_adjacency, epsilon
from fastdp.accounting.event_types import DpEvent
from fastdp.accounting.events import flatten
from fastdp.accounting.pld import Adjacency
from fastdp.accounting.serialisation import canonical, deserialise, serialise

FORMAT, VERSION = "fastdp.card", 1
#: What stands in JSON for an infinite epsilon.
INFINITE = "inf"
#: The value of ``noise_source["key"]`` that voids a guarantee.
UNSAFE_KEY = "unsafe_reproducible"

_PACKAGES = ("fastdp", "torch", "numpy", "scipy", "dp-accounting", "prv-accountant", "opacus", "transformers", "peft")
_UNPROTECTED = (
    "training loss and other metrics of the training data",
    "realised batch sizes and the share of clipped units",
    "the choice of a checkpoint by private validation data",
    "trials of hyper-parameters: only the run described here is counted",
)


class Card(dict[str, Any]):
    """A card as a dict of JSON values; make one with `build`, read one with `load`."""

    @classmethod
    def build(
        cls,
        *,
        mechanism: Mapping[str, Any] | str,
        unit: str,
        adjacency: Adjacency,
        sampling: str,
        dataset_size: int,
        noise_multiplier: float,
        event: DpEvent,
        delta: float | None,
        planned_steps: int,
        spent_steps: int,
        noise_source: Mapping[str, Any],
        model: Mapping[str, Any],
        sample_rate: float | None = None,
        target_epsilon: float | None = None,
        run_id: str | None = None,
        flaws: Sequence[str] = (),
        assumptions: Sequence[str] = (),
        notes: Sequence[str] = (),
        unprotected: Sequence[str] = (),
        cross_check: bool = True,
    ) -> Card:
        """The card of a run.

        Args:
            mechanism: name and settings of the method.
            unit: what is protected: an example, a user, a record.
            sampling: ``poisson``, ``shuffled``, or how else units came to a release.
            noise_multiplier: of one step, as it stands in the event.
            event: what was spent, not what was planned.
            delta: None states no epsilon, and so no guarantee.
            noise_source: ``generator``, ``key`` (``unsafe_reproducible`` voids the guarantee) and ``secure_rounding``.
            model: ``name``, ``trained_parameters`` and whatever else describes what was trained.
            flaws: why the method as run carries no guarantee, as `paper` modes must state; any voids the guarantee.
            assumptions, notes, unprotected: what the method adds to the card's own.
            cross_check: also compute PRV's upper bound and RDP, which takes seconds.

        Raises ValueError for an event or delta that cannot be accounted for, TypeError for values that are not JSON.
        """
        check_adjacency(adjacency)
        flat = flatten(event)
        bound = None if delta is None else epsilon(event, delta, adjacency=adjacency)
        voids = list(flaws)
        if not flat.private:
            voids.append("something was released without noise (noise multiplier 0)")
        elif delta is None:
            voids.append("no delta was given, so no epsilon is stated")
        if noise_source.get("key") == UNSAFE_KEY:
            voids.append("the noise came from a reproducible key, which whoever knows it can subtract")
        checks = _cross_checks(event, delta, adjacency) if cross_check and delta is not None and not voids else {}
        body = {
            "format": FORMAT,
            "version": VERSION,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "run_id": run_id,
            "guarantee": "none" if voids else "differential privacy",
            "why_no_guarantee": voids,
            "mechanism": {"name": mechanism} if isinstance(mechanism, str) else dict(mechanism),
            "unit": unit,
            "adjacency": adjacency,
            "sampling": sampling,
            "sample_rate": sample_rate,
            "dataset_size": dataset_size,
            "noise_multiplier": noise_multiplier,
            "epsilon": {
                "upper_bound": None if bound is None else _finite(bound),
                "delta": delta,
                "accountant": "pld",
                "grid": None if bound is None else bound.interval,
                "target": None if target_epsilon is None else _finite(target_epsilon),
                "cross_checks": checks,
            },
            "event": serialise(event),
            "steps": {"planned": int(planned_steps), "spent": int(spent_steps)},
            "noise_source": dict(noise_source),
            "model": dict(model),
            "assumptions": [*_assumptions(sampling, adjacency, dataset_size, delta, noise_source), *assumptions],
            "unprotected": [*_UNPROTECTED, *unprotected],
            "notes": list(notes),
            "software": _software(),
        }
        # One pass through JSON, so that a card in memory equals the card read back.
        body = json.loads(canonical(body))
        return cls(body, digest=digest(body))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Card:
        """The card in a JSON file, unchecked (see `verify`). Raises ValueError if it is not a JSON object."""
        try:
            body = json.loads(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not a card: {error}") from None
        if not isinstance(body, dict):
            raise ValueError(f"{path} is not a card: it holds no JSON object")
        return cls(body)

    @property
    def event(self) -> DpEvent:
        """What was released."""
        return deserialise(self["event"])

    def to_json(self) -> str:
        """Indented JSON."""
        return json.dumps(self, indent=2, sort_keys=True, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """The card for a reader."""
        return _markdown(self)

    def save(self, path: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write JSON and Markdown beside each other, each in one piece; returns both paths.

        ``path`` is either file's, or their common stem; its folder is made if it is missing.
        """
        stem = Path(path)
        if stem.suffix in (".json", ".md"):
            stem = stem.with_suffix("")
        written = (stem.with_name(stem.name + ".json"), stem.with_name(stem.name + ".md"))
        for path, text in zip(written, (self.to_json(), self.to_markdown())):
            files.write(path, text, public=True)
        return written


def digest(card: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of the card without its digest. It shows accidents and careless edits; it is no signature."""
    body = {key: value for key, value in card.items() if key != "digest"}
    return hashlib.sha256(canonical(body).encode()).hexdigest()


def _finite(value: float) -> float | str:
    return float(value) if math.isfinite(value) else INFINITE


def _cross_checks(event: DpEvent, delta: float, adjacency: Adjacency) -> dict[str, Any]:
    return dict(_cached_checks(canonical(serialise(event)), delta, adjacency))


@lru_cache(maxsize=32)
def _cached_checks(event: str, delta: float, adjacency: Adjacency) -> tuple[tuple[str, Any], ...]:
    checks: list[tuple[str, Any]] = []
    for name, accountant in (("prv_upper_bound", "prv"), ("rdp", "rdp")):
        try:
            found: Any = _finite(epsilon(deserialise(event), delta, accountant, adjacency))  # type: ignore[arg-type]
        except ValueError as error:
            found = str(error)
        checks.append((name, found))
    return tuple(checks)


def _assumptions(
    sampling: str, adjacency: str, dataset_size: int, delta: float | None, noise_source: Mapping[str, Any]
) -> list[str]:
    found = [f"the number of units, {dataset_size}, is public"]
    if sampling == "shuffled":
        found.append("batches are shuffled, not sampled: no amplification is claimed")
        if adjacency == "zero_out":
            found.append(
                "a unit that is left out leaves its place in the order empty, as the number of places is public"
            )
    elif sampling == "poisson":
        found.append("which units were sampled in which step stays secret")
    if delta is not None and delta >= 1 / dataset_size:
        found.append(f"delta {delta:g} is not below 1/N: it alone would allow publishing a whole unit")
    if not noise_source.get("secure_rounding", False):
        found.append("nobody observes the noisy values at a precision that exposes floating-point rounding")
    return found


def _software() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _rounded_up(value: float | str | None) -> str:
    if value is None:
        return "not stated"
    if isinstance(value, str):
        return "infinite" if value == INFINITE else value
    return f"{math.ceil(value * 1e4) / 1e4:g}" if value < 100 else f"{math.ceil(value)}"


def _markdown(card: Card) -> str:
    bound = card["epsilon"]
    lines = ["# Privacy card", ""]
    if card["guarantee"] == "none":
        lines += ["**Guarantee: none.**", "", *(f"- {reason}" for reason in card["why_no_guarantee"]), ""]
    else:
        lines += [
            f"**epsilon <= {_rounded_up(bound['upper_bound'])} at delta = {bound['delta']:g}**, "
            f"for each {card['unit']} ({card['adjacency'].replace('_', '/')} adjacency).",
            "",
        ]
    grid = "closed form" if bound["grid"] is None else f"grid {bound['grid']:g}"
    title = "Epsilon of the event (no guarantee)" if card["guarantee"] == "none" else "Epsilon, upper bound"
    rows: list[tuple[str, Any]] = [
        ("Mechanism", _inline(card["mechanism"])),
        ("Unit", card["unit"]),
        ("Adjacency", card["adjacency"]),
        ("Sampling", card["sampling"]),
        ("Sample rate", card["sample_rate"]),
        ("Units", card["dataset_size"]),
        ("Noise multiplier", card["noise_multiplier"]),
        ("Steps", f"{card['steps']['spent']} spent of {card['steps']['planned']} planned"),
        (title, f"{_rounded_up(bound['upper_bound'])} (PLD, {grid})"),
        ("Delta", bound["delta"]),
        ("Target epsilon", _rounded_up(bound["target"])),
        *((f"Cross-check: {name}", _rounded_up(value)) for name, value in bound["cross_checks"].items()),
        ("Noise", _inline(card["noise_source"])),
        ("Model", _inline(card["model"])),
        ("Software", _inline(card["software"])),
        ("Run", card["run_id"]),
        ("Written", card["created"]),
    ]
    lines += ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows if value is not None), ""]
    for heading, key in (("Assumed", "assumptions"), ("Not protected", "unprotected"), ("Notes", "notes")):
        if card[key]:
            lines += [f"## {heading}", "", *(f"- {entry}" for entry in card[key]), ""]
    lines += [
        "## Event",
        "",
        "Anyone can recompute epsilon from this event: `fastdp verify` on the JSON card beside this page.",
        "",
        "```json",
        json.dumps(card["event"], indent=2),
        "```",
        "",
    ]
    return "\n".join(lines)


def _inline(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in fields.items() if value is not None)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
