"""A perturbed data set and its card: what each private token and each text was given, and what was not protected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdp.accounting import Card, Pure, noise_source
from fastdp.methods.selective.quality import DetectorQuality

PAPER_FLAWS = (
    "the paper's candidates depend on the token: what one token can become, another cannot, so no epsilon holds",
    "a token without a neighbour within the radius is sent as it is",
)
#: Of the typed cells, beside the epsilon between them.
_WITHIN_A_TYPE = "private tokens of one public type have the same law of replacements: between them epsilon is 0"
_UNPROTECTED = (
    "private text that the detector missed, and all text that it left alone",
    "which tokens are private, how many there are, and into how many pieces the tokenizer cuts a private word",
    "what the words around a private token tell about it, and a secret that several tokens or texts repeat",
    "the detector's and the tokenizer's settings, and the embedding table: they must be public",
)


def token_claim(budget: str, epsilon: float, most_tokens: int | None) -> Pure:
    """What is promised of each private token, or of those of a text if they share its budget.

    ``most_tokens`` is how many private tokens one text has at most; None where that is not known.
    """
    shared = budget == "text"
    whose = "the private tokens of each text together, each" if shared else "each private token,"
    units = min(most_tokens, 1) if shared and most_tokens is not None else most_tokens
    return Pure(f"{whose} among all tokens of the vocabulary", epsilon, units)


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
            unprotected=_UNPROTECTED,
            notes=(
                *((_WITHIN_A_TYPE,) if form == "typed" else ()),
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
