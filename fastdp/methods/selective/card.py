"""A perturbed data set and its card: what each private token and each text was given, and what was not protected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdp.accounting import Card, noise_source
from fastdp.accounting.statements import PAPER_FLAWS, SELECTED_TOKENS, WITHIN_A_TYPE, token_claim
from fastdp.methods.selective.quality import DetectorQuality


@dataclass(frozen=True)
class PerturbedTexts:
    """Texts as token ids, private tokens replaced: all that training may see of them.

    Attributes:
        ids: token ids of each text, without the tokenizer's special tokens.
        private: which of them were replaced; keep it with the private data.
        epsilons: budget spent on each text, the sum over its private tokens.
        settings: what it was made with, as on the card.
        reproducible, rounds: whether the draws came from a reproducible key, and of how many rounds of ChaCha.
        earlier: releases of the same texts before this one, in words.
        from_cache: whether they were read back rather than drawn, at no further cost.
    """

    ids: list[list[int]]
    private: list[list[bool]]
    epsilons: list[float]
    settings: dict[str, Any]
    reproducible: bool
    rounds: int
    earlier: tuple[str, ...] = ()
    from_cache: bool = False

    def texts(self, tokenizer: Any) -> list[str]:
        """The perturbed texts for a reader; train on ``ids``, as encoding these anew may give other tokens."""
        return [tokenizer.decode(ids) for ids in self.ids]

    def card(self, quality: DetectorQuality | None = None) -> Card:
        """What was bought; ``quality`` states the detector's miss rate (`measure_detector`)."""
        private, form = sum(map(sum, self.private)), self.settings["mechanism"]
        most = max(map(sum, self.private), default=0)
        card = Card.of(
            token_claim(self.settings["budget"], self.settings["epsilon"], most),
            mechanism={"name": self.settings["name"], "form": form},
            noise_source=noise_source(self.reproducible, rounds=self.rounds),
            flaws=PAPER_FLAWS if form == "paper" else (),
            unprotected=SELECTED_TOKENS,
            notes=(
                *((WITHIN_A_TYPE,) if form == "typed" else ()),
                *(() if private else ("the detector found no private token: nothing was perturbed",)),
                f"the detector's miss rate: {_miss_rate(quality)}",
            ),
            facts={
                "settings": dict(self.settings),
                "mean_of_a_text": sum(self.epsilons) / len(self.epsilons) if self.epsilons else 0.0,
                "tokens": {"private": private, "all": sum(map(len, self.ids)), "texts": len(self.epsilons)},
                "detector_quality": None if quality is None else vars(quality),
            },
        )
        return card.after(self.earlier)


def _miss_rate(quality: DetectorQuality | None) -> str:
    if quality is None:
        return "not measured: give labelled spans of text like this"
    return (
        f"{quality.span_miss_rate:.1%} of labelled spans and {quality.character_miss_rate:.1%} of their characters, "
        f"measured on {quality.texts} texts ({quality.corpus})"
    )
