"""The card: what privacy a run bought, in a form that a machine can check and a person can read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastdp.files as files
from fastdp.accounting.claim import Claim, Gaussian, read_claim, rounded_up
from fastdp.accounting.event_types import DpEvent
from fastdp.accounting.pld import Adjacency
from fastdp.accounting.serialisation import canonical
from fastdp.accounting.weights import digests

if TYPE_CHECKING:
    from torch import Tensor

FORMAT, VERSION = "fastdp.card", 2
#: The value of ``noise_source["key"]`` that voids a guarantee.
UNSAFE_KEY = "unsafe_reproducible"

_PACKAGES = (
    *("fastdp", "torch", "numpy", "scipy", "dp-accounting", "prv-accountant", "opacus", "transformers", "tokenizers"),
    "peft",
)
_REPRODUCIBLE = "the noise came from a reproducible key, which whoever knows it can subtract"
_UNPROTECTED = (
    "training loss and other metrics of the training data",
    "realised batch sizes and the share of clipped units",
    "the choice of a checkpoint by private validation data",
    "trials of hyper-parameters: only the run described here is counted",
)
#: What a card has besides its claim and its facts.
_ENVELOPE = (
    *("format", "version", "created", "run_id", "guarantee", "why_no_guarantee", "also", "mechanism", "noise_source"),
    *("assumptions", "unprotected", "notes", "remaining", "weights", "ledger_head", "software", "digest"),
)


def noise_source(reproducible: bool, secure_rounding: bool | None = None) -> dict[str, Any]:
    """Where noise came from, for a card; a reproducible key voids its guarantee.

    Args:
        secure_rounding: whether noised sums were rounded to a grid; None for draws that are no sums.
    """
    key = UNSAFE_KEY if reproducible else "operating system"
    stated = {} if secure_rounding is None else {"secure_rounding": secure_rounding}
    return {"generator": "ChaCha20", "key": key, **stated}


def rounded_to_grid(distance: float) -> str:
    """What a card says of noised sums that were rounded to a grid: how far all of them are from real numbers so rounded."""
    return f"noised sums are rounded as real numbers would be up to a distance of {distance:.1e}, part of delta"


class Card(dict[str, Any]):
    """A card as a dict of JSON values; make one with `of` or `build`, read one with `load`."""

    @classmethod
    def of(
        cls,
        claim: Claim | None,
        *,
        mechanism: Mapping[str, Any] | str,
        noise_source: Mapping[str, Any],
        also: Sequence[Claim] = (),
        run_id: str | None = None,
        flaws: Sequence[str] = (),
        assumptions: Sequence[str] = (),
        unprotected: Sequence[str] = (),
        notes: Sequence[str] = (),
        remaining: Sequence[str] = (),
        weights: Iterable[Tensor] | None = None,
        ledger_head: str | None = None,
        cross_check: bool = True,
        facts: Mapping[str, Any] | None = None,
    ) -> Card:
        """The card of a claim.

        Args:
            claim: what is claimed; None claims nothing, and ``flaws`` say why.
            mechanism: name and settings of the method.
            noise_source: ``generator``, ``key`` (``unsafe_reproducible`` voids the guarantee) and ``secure_rounding``.
            also: further claims, which add to the first.
            flaws: why the method as run carries no guarantee, as `paper` modes must state; any voids the guarantee.
            assumptions, unprotected, notes: what a reader must know.
            remaining: what the mechanism does not cover, with its size, such as the rounding of sums.
            weights: what was released; the card keeps a digest of each tensor.
            ledger_head: digest of the ledger's last record.
            cross_check: also compute PRV's upper bound and RDP, which takes seconds.
            facts: what else the card states, by name.

        Raises ValueError for an event or delta that cannot be accounted for, TypeError for values that are not JSON.
        """
        voids = list(flaws)
        for each in () if claim is None else (claim, *also):
            voids += each.flaws()
        if noise_source.get("key") == UNSAFE_KEY:
            voids.append(_REPRODUCIBLE)
        if claim is None and not voids:
            raise ValueError("a card without a claim must say why there is none")
        stated = {"kind": "none"} if claim is None else claim.to_json(cross_check and not voids)
        further = {} if facts is None else dict(facts)
        if shadowed := further.keys() & {*_ENVELOPE, *stated}:
            raise ValueError(f"{min(shadowed)} stands on every card: give the fact another name")
        body = {
            "format": FORMAT,
            "version": VERSION,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "run_id": run_id,
            "guarantee": "none" if voids or claim is None else claim.guarantee,
            "why_no_guarantee": voids,
            **stated,
            "also": [each.to_json(cross_check and not voids) for each in also],
            "mechanism": {"name": mechanism} if isinstance(mechanism, str) else dict(mechanism),
            **further,
            "noise_source": dict(noise_source),
            "assumptions": list(assumptions),
            "unprotected": list(unprotected),
            "notes": list(notes),
            "remaining": list(remaining),
            "weights": None if weights is None else digests(weights),
            "ledger_head": ledger_head,
            "software": _software(),
        }
        # One pass through JSON, so that a card in memory equals the card read back.
        body = json.loads(canonical(body))
        return cls(body, digest=digest(body))

    @classmethod
    def build(
        cls,
        *,
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
        flaws: Sequence[str] = (),
        assumptions: Sequence[str] = (),
        unprotected: Sequence[str] = (),
        **others: Any,
    ) -> Card:
        """The card of a run that trained a model by steps of one kind.

        Args:
            unit: what is protected: an example, a user, a record.
            sampling: ``poisson``, ``shuffled``, or how else units came to a release.
            noise_multiplier: of one step, as it stands in the event.
            event: what was spent, not what was planned.
            delta: None states no epsilon, and so no guarantee; nor does one that is not below 1/N.
            model: ``name``, ``trained_parameters`` and whatever else describes what was trained.
            assumptions, unprotected: what the method adds to the card's own.
            noise_source, flaws, others: as in `of`.
        """
        void = [] if delta is None or delta < 1 / dataset_size else [large_delta(delta, dataset_size)]
        return cls.of(
            Gaussian(unit, adjacency, event, delta, target_epsilon),
            noise_source=noise_source,
            flaws=[*flaws, *void],
            assumptions=[*_assumptions(sampling, adjacency, dataset_size, noise_source), *assumptions],
            unprotected=[*_UNPROTECTED, *unprotected],
            facts={
                "sampling": sampling,
                "sample_rate": sample_rate,
                "dataset_size": dataset_size,
                "noise_multiplier": noise_multiplier,
                "steps": {"planned": int(planned_steps), "spent": int(spent_steps)},
                "model": dict(model),
            },
            **others,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Card:
        """The card in a JSON file, unchecked (see `verify`). Raises ValueError if it is not a JSON object."""
        try:
            return cls(parse(Path(path).read_bytes()))
        except ValueError as error:
            raise ValueError(f"{path} is not a card: {error}") from None

    def with_facts(self, **facts: Any) -> Card:
        """The same card with more facts, or others in the place of those it has. Raises TypeError for what is not JSON."""
        if shadowed := facts.keys() & {*_ENVELOPE, "kind", "unit", "budget", "bound", "epsilon", "event"}:
            raise ValueError(f"{min(shadowed)} stands on every card: give the fact another name")
        body = json.loads(canonical({key: value for key, value in {**self, **facts}.items() if key != "digest"}))
        return Card(body, digest=digest(body))

    def after(self, earlier: Sequence[str]) -> Card:
        """The same card, which says that its data were released before (see `fastdp.accounting.witness.count_release`)."""
        return self.with_facts(earlier_releases=list(earlier)) if earlier else self

    @property
    def claims(self) -> list[Claim]:
        """What it claims, the first first. Raises ValueError for a claim that cannot be read."""
        return [] if self.get("kind") == "none" else [read_claim(fields) for fields in (self, *self.get("also", ()))]

    @property
    def event(self) -> DpEvent:
        """What was released, of a claim that rests on an event. Raises ValueError if there is none."""
        found = next((claim.event for claim in self.claims if isinstance(claim, Gaussian)), None)
        if found is None:
            raise ValueError("this card's claim rests on no event")
        return found

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


def parse(text: str | bytes) -> dict[str, Any]:
    """A JSON object in which every key stands once. Raises ValueError, in one sentence, for anything else."""
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = [key for key, _ in pairs]
        twice = next(key for key in seen if seen.count(key) > 1)
        raise ValueError(f"{twice!r} stands in it twice, and readers differ in which they take")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def large_delta(delta: float, dataset_size: int) -> str:
    """Why a delta that is not below 1/N claims nothing."""
    return f"delta {delta:g} is not below 1/N = {1 / dataset_size:.3g}: it alone would allow publishing a whole unit"


def _assumptions(sampling: str, adjacency: str, dataset_size: int, noise_source: Mapping[str, Any]) -> list[str]:
    found = [f"the number of units, {dataset_size}, is public"]
    if sampling == "shuffled":
        found.append("batches are shuffled, not sampled: no amplification is claimed")
        if adjacency == "zero_out":
            found.append(
                "a unit that is left out leaves its place in the order empty, as the number of places is public"
            )
    elif sampling == "poisson":
        found.append("which units were sampled in which step stays secret")
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


#: Headings of what a reader must know, and where it stands.
_LISTS = (
    ("Assumed", "assumptions"),
    ("What remains", "remaining"),
    ("Not protected", "unprotected"),
    ("Notes", "notes"),
)
#: More entries than this get a section of their own.
_INLINE = 8


def _markdown(card: Card) -> str:
    lines, sections = ["# Privacy card", ""], []
    claims = () if card["kind"] == "none" else (card, *card["also"])
    if card["guarantee"] == "none":
        lines += ["**Guarantee: none.**", "", *(f"- {reason}" for reason in card["why_no_guarantee"]), ""]
    else:
        headlines = [read_claim(fields).headline(fields) for fields in claims]
        lines += [line for bound, words in headlines for line in (f"**{bound}**{words}", "")]
    rows: list[tuple[str, Any]] = [("Mechanism", _inline(card["mechanism"]))]
    if card["kind"] == Gaussian.kind:
        rows += _epsilon_rows(card)
    shown = {*_ENVELOPE, *(key for fields in claims for key in read_claim(fields).to_json(False))}
    for key, value in card.items():
        if key in shown or value is None or value in ([], {}):
            continue
        if isinstance(value, (dict, list)) and len(value) > _INLINE:
            sections.append((_title(key), json.dumps(value, indent=2)))
        else:
            rows.append((_title(key), _shown(key, value)))
    rows += [
        ("Noise", _inline(card["noise_source"])),
        ("Software", _inline(card["software"])),
        ("Run", card["run_id"]),
        ("Written", card["created"]),
    ]
    if card.get("membership") and card["guarantee"] != "none":
        lines += _meaning(card)
    lines += ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows if value is not None), ""]
    for heading, key in _LISTS:
        if card[key]:
            lines += [f"## {heading}", "", *(f"- {entry}" for entry in card[key]), ""]
    lines += ["`fastdp verify` works its figures out again from the JSON card beside this page.", ""]
    sections += [
        (f"Event, {fields['unit']}", json.dumps(fields["event"], indent=2)) for fields in claims if "event" in fields
    ]
    for title, text in sections:
        lines += [f"## {title}", "", "```json", text, "```", ""]
    return "\n".join(lines)


def _meaning(card: Card) -> list[str]:
    unit, adjacency = card["unit"], card["adjacency"]
    asked = f"which of two versions of one {unit} was" if adjacency == "replace_one" else f"whether one {unit} was"
    rows = [
        f"| {float(rate):.1%} | {min(1.0, math.ceil(most * 1e4) / 1e4):.2%} |"
        for rate, most in card["membership"].items()
    ]
    return [
        f"What that means: someone sees all that was released, knows everything else in the data and computes as long as he "
        f"likes, to find out {asked} among them. However he goes about it:",
        "",
        "| of those who were not, he accuses | of those who were, he finds at most |",
        "|---|---|",
        *rows,
        "",
    ]


def _epsilon_rows(card: Card) -> list[tuple[str, Any]]:
    bound = card["epsilon"]
    grid = "closed form" if bound["grid"] is None else f"grid {bound['grid']:g}"
    title = "Epsilon of the event (no guarantee)" if card["guarantee"] == "none" else "Epsilon, upper bound"
    return [
        ("Unit", card["unit"]),
        ("Adjacency", card["adjacency"]),
        (title, f"{rounded_up(bound['upper_bound'])} (PLD, {grid})"),
        ("Delta", bound["delta"]),
        ("Target epsilon", rounded_up(bound["target"])),
        *((f"Cross-check: {name}", rounded_up(value)) for name, value in bound["cross_checks"].items()),
    ]


def _title(key: str) -> str:
    return key.replace("_", " ").capitalize()


def _shown(key: str, value: Any) -> str:
    if key == "steps":
        return f"{value['spent']} spent of {value['planned']} planned"
    if isinstance(value, dict):
        return _inline(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _inline(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in fields.items() if value is not None)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
