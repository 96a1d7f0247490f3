"""The card of a perturbed data set: what each private token and each text was given, and what was not protected."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastdp.accounting.card import Card, digest
from fastdp.accounting.serialisation import canonical
from fastdp.methods.selective.quality import DetectorQuality

FORMAT, VERSION = "fastdp.selective-card", 1

#: What the guarantee of each form says of one private token, epsilon being the token's.
GUARANTEES = {
    "local": "epsilon-local differential privacy of each private token, among all tokens of the vocabulary",
    "metric": "epsilon times distance metric privacy of each private token, among all tokens of the vocabulary",
    "partition": "epsilon-local differential privacy of each private token, among the tokens of its public cell",
}
_PAPER_FLAWS = (
    "the paper's candidates depend on the token: what one token can become, another cannot, so no epsilon holds",
    "a token without a neighbour within the radius is sent as it is",
)
_UNPROTECTED = (
    "private text that the detector missed, and all text that it left alone",
    "which tokens are private, how many there are, and into how many pieces the tokenizer cuts a private word",
    "what the words around a private token tell about it, and a secret that several tokens or texts repeat",
    "the detector's and the tokenizer's settings, and the embedding table: they must be public",
)


class SelectiveCard(Card):
    """The card of one perturbed data set, a dict of JSON values; ``save`` writes JSON and Markdown as `Card` does."""

    @classmethod
    def of_run(
        cls,
        *,
        settings: Mapping[str, Any],
        epsilons: Sequence[float],
        private_tokens: int,
        tokens: int,
        reproducible: bool,
        quality: DetectorQuality | None,
        notes: Sequence[str] = (),
    ) -> SelectiveCard:
        """The card of a perturbation with these settings.

        Args:
            settings: `SelectivePerturbation.describe` with the radius that was used.
            epsilons: budget of each text: the sum over its private tokens.
            reproducible: whether the draws came from a reproducible key, which voids the guarantee.
            quality: what the detector misses; None says that nobody measured it.
        """
        form = settings["mechanism"]
        voids = list(_PAPER_FLAWS) if form == "paper" else []
        if reproducible:
            voids.append("the draws came from a reproducible key, which whoever knows it can repeat")
        body = {
            "format": FORMAT,
            "version": VERSION,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "guarantee": "none" if voids else GUARANTEES[form],
            "why_no_guarantee": voids,
            "settings": dict(settings),
            "budget": {
                "unit": "per unit of distance" if form == "metric" else "epsilon",
                "largest_of_a_text": max(epsilons, default=0.0),
                "mean_of_a_text": sum(epsilons) / len(epsilons) if epsilons else 0.0,
                "releases": 1,
            },
            "tokens": {"private": private_tokens, "all": tokens, "texts": len(epsilons)},
            "detector_quality": None if quality is None else quality.as_dict(),
            "unprotected": list(_UNPROTECTED),
            "notes": list(notes),
            "software": _software(),
        }
        body = json.loads(canonical(body))
        return cls(body, digest=digest(body))

    def to_markdown(self) -> str:
        """The card for a reader."""
        lines = ["# Card of a selectively perturbed data set", ""]
        if self["guarantee"] == "none":
            lines += ["**Guarantee: none.**", "", *(f"- {reason}" for reason in self["why_no_guarantee"]), ""]
        else:
            lines += [f"**Guarantee: {self['guarantee']}.**", ""]
        settings, budget, tokens = self["settings"], self["budget"], self["tokens"]
        rows = [
            ("Mechanism", settings["mechanism"]),
            (f"Epsilon of each {settings['budget']}", f"{settings['epsilon']:g}"),
            ("Largest epsilon of a text", f"{budget['largest_of_a_text']:g} ({budget['unit']})"),
            ("Mean epsilon of a text", f"{budget['mean_of_a_text']:.4g} ({budget['unit']})"),
            ("Radius", settings["radius"]),
            ("Perturbed tokens", f"{tokens['private']} of {tokens['all']} in {tokens['texts']} texts, drawn once"),
            ("Detector", ", ".join(f"{key}: {value}" for key, value in settings["detector"].items())),
            ("Policy", ", ".join(f"{key}: {value}" for key, value in settings["policy"].items())),
            ("Detector's miss rate", _miss_rate(self["detector_quality"])),
            ("Written", self["created"]),
        ]
        lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows if value is not None), ""]
        for heading, key in (("Not protected", "unprotected"), ("Notes", "notes")):
            if self[key]:
                lines += [f"## {heading}", "", *(f"- {entry}" for entry in self[key]), ""]
        return "\n".join(lines)


def _miss_rate(quality: Mapping[str, Any] | None) -> str:
    if quality is None:
        return "not measured: give labelled spans of text like this"
    return (
        f"{quality['span_miss_rate']:.1%} of labelled spans and {quality['character_miss_rate']:.1%} of their characters, "
        f"measured on {quality['texts']} texts ({quality['corpus']})"
    )


def _software() -> dict[str, str]:
    found = {}
    for package in ("fastdp", "torch", "transformers", "tokenizers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
