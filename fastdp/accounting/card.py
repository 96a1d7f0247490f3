"""The card: which guarantee a run has, in a form that a machine can check and a person can read."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastdp.files as files
from fastdp.accounting.claim import Claim, Gaussian, read_claim
from fastdp.accounting.event_types import DpEvent
from fastdp.accounting.exports import export
from fastdp.accounting.page import ENVELOPE, claims, markdown
from fastdp.accounting.pld import Adjacency
from fastdp.accounting.serialisation import canonical
from fastdp.accounting.statements import AMONG_UNITS, GRID
from fastdp.accounting.weights import digests, model_files
from fastdp.distribution import installed_version, version_of, wheel_digest
from fastdp.untrusted import MAX_CARD, parse_json_object, read_bytes

if TYPE_CHECKING:
    from torch import Tensor

FORMAT, VERSION = "fastdp.card", 2
#: The value of ``noise_source["key"]`` that voids a guarantee.
UNSAFE_KEY = "unsafe_reproducible"
#: Its value for a key that nobody knows.
SYSTEM_KEY = "operating system"

#: Tokens of a unit for which a card states what rounding among units comes to.
_STATED = 1024

_PACKAGES = ("torch", "numpy", "scipy", "dp-accounting", "opacus", "transformers", "tokenizers", "peft")
_REPRODUCIBLE = "the noise came from a reproducible key, which whoever knows it can subtract"
#: What no run protects.
UNPROTECTED = (
    "training loss and other metrics of the training data",
    "realised batch sizes and the share of clipped units",
    "the choice of a checkpoint by private validation data",
    "trials of hyper-parameters: only the run described here is counted",
)


def noise_source(reproducible: bool, secure_rounding: bool | None = None, rounds: int = 20) -> dict[str, Any]:
    """Where noise came from, for a card. Raises nothing.

    Args:
        reproducible: whether its key can be known, which voids the guarantee.
        secure_rounding: whether noised sums were rounded to a grid; None for draws that are no sums.
        rounds: of ChaCha, as the stream that drew has them.

    >>> from fastdp.accounting import noise_source
    >>> noise_source(reproducible=False)["key"]
    'operating system'
    """
    key = UNSAFE_KEY if reproducible else SYSTEM_KEY
    stated = {} if secure_rounding is None else {"secure_rounding": secure_rounding}
    return {"generator": f"ChaCha{rounds}", "key": key, **stated}


def rounded_to_grid(distance: float) -> str:
    """What a card says of noised sums that were rounded to a grid. Raises nothing.

    Args:
        distance: how far all of them together are from real numbers so rounded, in total variation; a part of delta.

    >>> from fastdp.accounting import rounded_to_grid
    >>> "1.0e-18" in rounded_to_grid(1e-18)
    True
    """
    return f"{GRID}{distance:.1e}, part of delta"


def among_units(units: int, tokens: int, spread: float) -> float:
    """How far rounding *among* the units of one sum may move it when one unit is left out, in units of the clipping bound.

    What a unit adds is within its bound; that the others' sums then round in other places is not part of it. With the unit
    and without it, each other one is off by at most gamma_k times its weight times its products (docs/clipping.md). Here k,
    the additions that a term may go through, is at most ``tokens``. ``spread`` is the most that a unit's products are above
    its norm: about the square root of its tokens where their gradients are orthogonal.
    """
    error = (tokens + 3) * 2.0**-24
    return 2 * (units - 1) * spread * error / (1 - error) if error < 0.25 else float("inf")


def among_units_in_words(units: int, tokens: int | None = None) -> str:
    """`among_units` as a card states it, beside what roundings that are independent of each other come to.

    For units of the most ``tokens`` that settings allow, or of a length that is the same on every card: how long those that
    were drawn are is private.
    """
    tokens = tokens or _STATED
    spread, additions = tokens**0.5, units * (tokens + 1)
    worst = among_units(units, additions, spread)
    likely = 2 * spread * (max(0, units - 1) * (additions + 3)) ** 0.5 * 2.0**-24
    return (
        f"{AMONG_UNITS}{units} units of {tokens:,} tokens each "
        f"move it by some {likely:.1e} of the bound where roundings are independent, and by {worst:.1e} at most; of n times as "
        "many tokens by n and by n^1.5 times that"
    )


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
            facts: what else the card states, by name.
        """
        voids = list(flaws)
        for each in () if claim is None else (claim, *also):
            voids += each.flaws()
        if noise_source.get("key") == UNSAFE_KEY:
            voids.append(_REPRODUCIBLE)
        if claim is None and not voids:
            raise ValueError("a card without a claim must say why there is none")
        stated = {"kind": "none"} if claim is None else claim.to_json()
        further = {} if facts is None else dict(facts)
        if shadowed := further.keys() & {*ENVELOPE, *stated}:
            raise ValueError(f"{min(shadowed)} stands on every card: give the fact another name")
        body = {
            "format": FORMAT,
            "version": VERSION,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "run_id": run_id,
            "guarantee": "none" if voids or claim is None else claim.guarantee,
            "why_no_guarantee": voids,
            **stated,
            "also": [each.to_json() for each in also],
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
            sampling: ``poisson``, ``shuffled``, or how else units came to a release.
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
            assumptions=[*assumptions_of(sampling, adjacency, dataset_size, noise_source), *assumptions],
            unprotected=[*UNPROTECTED, *unprotected],
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
            return cls(parse_json_object(read_bytes(path, MAX_CARD)))
        except ValueError as error:
            raise ValueError(f"{path} is not a card: {error}") from None

    def with_facts(self, **facts: Any) -> Card:
        """The same card with more facts, or others in the place of those it has. Raises TypeError for what is not JSON."""
        if shadowed := facts.keys() & {*ENVELOPE, "kind", "unit", "budget", "bound", "epsilon", "event"}:
            raise ValueError(f"{min(shadowed)} stands on every card: give the fact another name")
        body = json.loads(canonical({key: value for key, value in {**self, **facts}.items() if key != "digest"}))
        return Card(body, digest=digest(body))

    def after(self, earlier: Sequence[str]) -> Card:
        """The same card, which says that its data were released before (see `fastdp.accounting.witness.count_release`)."""
        return self.with_facts(earlier_releases=list(earlier)) if earlier else self

    @property
    def claims(self) -> list[Claim]:
        """What it claims, the first first. Raises ValueError for a claim that cannot be read."""
        return [read_claim(fields) for fields in claims(self)]

    def to_json(self) -> str:
        """Indented JSON."""
        return json.dumps(self, indent=2, sort_keys=True, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """The card for a reader."""
        return markdown(self)

    def save_beside(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``card.json``, ``card.md`` and, in the place of any other, a ``README.md`` to a model's folder; returns it."""
        card = self.of_files(folder)
        card.save(Path(folder) / "card")
        files.write(Path(folder) / "README.md", export(card, "huggingface"), public=True)
        return Path(folder)

    def of_files(self, folder: str | os.PathLike[str]) -> Card:
        """The same card, bound to a model's files: it keeps a digest of each file of weights and of an adapter's config.

        An adapter's config there keeps no path of its base model.
        """
        remove_base_path(folder)
        found = model_files(Path(folder))
        return self.with_facts(files=found) if found else self

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


def public_name(name: str) -> str:
    """What a card calls a model: its name on a hub, or the last part of a folder's path, which says nothing of a machine."""
    return hub_name(name) or Path(name.replace("\\", "/")).resolve().name or "model"


def hub_name(name: str) -> str | None:
    """A model's name on a hub; None for a folder's path, and for what is no name of a hub."""
    named = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)
    return name if named and not Path(name).exists() else None


def remove_base_path(folder: str | os.PathLike[str]) -> None:
    """Let an adapter's config call its base model by its name on a hub, or not at all: a path tells of its owner's machine."""
    config = Path(folder) / "adapter_config.json"
    if config.exists():
        settings = json.loads(config.read_text(encoding="utf-8"))
        base = settings.get("base_model_name_or_path")
        files.write_json(config, settings | {"base_model_name_or_path": hub_name(base) if base else None}, public=True)


def model_name(model: Any) -> str:
    """What a card calls a model. Raises nothing.

    Args:
        model: any; it is called by what transformers loaded it by, without its folder's path, or else by its class.

    >>> import torch
    >>> from fastdp.accounting import model_name
    >>> model_name(torch.nn.Linear(1, 1))
    'Linear'
    """
    loaded = getattr(getattr(model, "config", None), "_name_or_path", "")
    return public_name(loaded) if loaded else type(model).__name__


def large_delta(delta: float, dataset_size: int) -> str:
    """Why a delta that is not below 1/N claims nothing."""
    return f"delta {delta:g} is not below 1/N = {1 / dataset_size:.3g}: it alone would allow publishing a whole unit"


def assumptions_of(sampling: str, adjacency: str, dataset_size: int, noise_source: Mapping[str, Any]) -> list[str]:
    """What a run's card assumes, as far as its fields say it."""
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
    wheel = wheel_digest()
    own = {"fastdp": installed_version(), "fastdp_wheel": wheel and f"sha256:{wheel}"}
    found = {"python": platform.python_version(), **own, **{name: version_of(name) for name in _PACKAGES}}
    return {name: version for name, version in found.items() if version}
