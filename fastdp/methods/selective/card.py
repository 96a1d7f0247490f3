"""The card of a perturbed data set: what each private token and each text was given, and what was not protected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastdp.accounting import Card, Metric, Pure, noise_source
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


def token_claim(form: str, budget: str, epsilon: float, most_tokens: int | None, releases: int = 1) -> Pure:
    """What a form of the mechanism promises of each private token, or of those of a text where they share its budget.

    Args:
        form, budget, epsilon: as in `SelectivePerturbation`.
        most_tokens: most private tokens in one text; None where that is not known.
        releases: of each text.
    """
    among = "the tokens of its public cell" if form == "partition" else "all tokens of the vocabulary"
    shared = budget == "text"
    unit = f"{'the private tokens of each text together, each' if shared else 'each private token,'} among {among}"
    units = min(most_tokens, 1) if shared and most_tokens is not None else most_tokens
    if form == "metric":
        return Metric(unit, epsilon, units, releases, "the distance of the tokens' rows")
    return Pure(unit, epsilon, units, releases)


def perturbation_card(
    *,
    settings: Mapping[str, Any],
    epsilons: Sequence[float],
    most_tokens: int,
    private_tokens: int,
    tokens: int,
    reproducible: bool,
    quality: DetectorQuality | None,
    releases: int = 1,
) -> Card:
    """The card of a perturbation with these settings.

    Args:
        settings: `SelectivePerturbation.describe` with the radius that was used.
        epsilons: budget of each text: the sum over its private tokens.
        most_tokens: most private tokens in one text.
        private_tokens, tokens: in all texts.
        reproducible: whether the draws came from a reproducible key, which voids the guarantee.
        quality: what the detector misses; None says that nobody measured it.
        releases: how often these texts were drawn, this draw included.
    """
    form = settings["mechanism"]
    return Card.of(
        token_claim(form, settings["budget"], settings["epsilon"], most_tokens, releases),
        mechanism={"name": settings["name"], "form": form},
        noise_source=noise_source(reproducible),
        flaws=PAPER_FLAWS if form == "paper" else (),
        unprotected=_UNPROTECTED,
        notes=(
            *((_WITHIN_A_TYPE,) if form == "typed" else ()),
            *(() if private_tokens else ("the detector found no private token: nothing was perturbed",)),
            f"the detector's miss rate: {_miss_rate(quality)}",
        ),
        facts={
            "settings": dict(settings),
            "mean_of_a_text": sum(epsilons) / len(epsilons) if epsilons else 0.0,
            "tokens": {"private": private_tokens, "all": tokens, "texts": len(epsilons)},
            "detector_quality": None if quality is None else quality.as_dict(),
        },
    )


def _miss_rate(quality: DetectorQuality | None) -> str:
    if quality is None:
        return "not measured: give labelled spans of text like this"
    found = quality.as_dict()
    return (
        f"{found['span_miss_rate']:.1%} of labelled spans and {found['character_miss_rate']:.1%} of their characters, "
        f"measured on {found['texts']} texts ({found['corpus']})"
    )
