"""What the card of each mechanism states beside its figures: its fields, and sentences that follow from them.

Methods write their cards from here and `verify` reads them by it, so that no field or sentence can be left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastdp.accounting.claim import ROOM, Claim, ExternalClaim, Pure
from fastdp.untrusted import quote

TRUST = "the data may be adversarial; the code that trained is honest"
#: What remains of a sum's rounding.
GRID = "noised sums are rounded as real numbers would be up to a distance of "
AMONG_UNITS = "rounding among the units of one sum is no part of any unit's bound: about "
LOCAL_GUARANTEE = "local differential privacy: the figure holds against whoever receives "
#: Not protected by EW-FT.
SEQUENCES = (
    "labels: the guarantee covers a sequence, not the label that comes with it",
    "which sequence belongs to whom, and when it is used",
)
#: Not protected by SAP's replaced tokens, nor by its noised rows.
REPLACED_TOKENS = (
    "the number of tokens of each text",
    "where an encoder put opening, closing, separating and padding tokens",
    "labels, and gradients of the output layer, from which labels can be read",
    "what several tokens say together: the bounds of a text's tokens add up",
)
NOISED_ROWS = ("the length of each text", "labels, and gradients of the output layer")
PUBLIC_TABLE = "the embedding table is public, and does not depend on the texts"
PUBLIC_BOTTOM = (
    "the bottom's weights are public",
    "nobody observes the noisy rows at a precision that exposes floating-point rounding",
)
TRAINABLE = (
    "the bottom is trained: every pass releases each text anew, and at the bottom's new weights, which are computed from "
    "the texts without noise and shape what is released of every other text"
)
#: Not protected by selective perturbation, and why the paper's form guarantees nothing.
SELECTED_TOKENS = (
    "private text that the detector missed, and all text that it left alone",
    "which tokens are private, how many there are, and into how many pieces the tokenizer cuts a private word",
    "what the words around a private token tell about it, and a secret that several tokens or texts repeat",
    "the detector's and the tokenizer's settings, and the embedding table: they must be public",
)
PAPER_FLAWS = (
    "the paper's candidates depend on the token: what one token can become, another cannot, so no epsilon holds",
    "a token without a neighbour within the radius is sent as it is",
)
#: Of typed cells, beside the epsilon between them.
WITHIN_A_TYPE = "private tokens of one public type have the same law of replacements: between them epsilon is 0"
NOISED_COUNTS = "private texts, with noise"
PUBLIC_CANDIDATES = "candidates, labels and the encoder are public: none was made from the private records but by votes"
UNCOUNTED = "how many updates came is not stated: who was sampled is secret"
SEARCH_TIME = "how long the search took, which tells how many trials were made"
#: Not protected by a federation with central DP.
KEPT_BY_THE_SERVER = (
    "rounds.jsonl, server.safetensors and the server's log hold who was sampled and refused, how many answered in each round, "
    "and losses that clients reported without noise: they must stay with the server"
)
SYNTHETIC = (
    "these rows were drawn from weights that the run released, so its claim holds for them as it does for the weights "
    "(post-processing); prompts are public"
)
#: How sequences come to EW-FT, and records to votes.
UNSAMPLED, EVERY_ROUND = (
    "none claimed: the receiver sees which release is whose",
    "none: every record votes in every round",
)
ONE_TOKEN, ONE_TEXT = "one token, with the other tokens of its text given", "one text, among texts of its length"
ONE_SEQUENCE = "one user's sequence"
COUNTED_TEXT = "text with its label, added or removed"


def token_claim(budget: str, epsilon: float, most_tokens: int | None) -> Pure:
    """What is promised of each private token, or of those of a text if they share its budget.

    ``most_tokens`` is how many private tokens one text has at most; None where that is not known.
    """
    shared = budget == "text"
    whose = "the private tokens of each text together, each" if shared else "each private token,"
    units = min(most_tokens, 1) if shared and most_tokens is not None else most_tokens
    return Pure(f"{whose} among all tokens of the vocabulary", epsilon, units)


def federated_claims(settings: Mapping[str, Any]) -> tuple[list[Claim], list[str]]:
    """What a federation of these settings claims, and what is open to the server and everyone else."""
    claims: list[Claim] = []
    flaws = []
    if settings["perturbation"] == "none":
        flaws.append("clients train on their texts as they are")
    elif settings["mechanism"] == "paper":
        flaws.append("clients perturb by the paper's mechanism, for which no epsilon holds")
    else:
        claims.append(token_claim(settings["budget"], settings["epsilon"], None))
    if settings["dpsgd_epsilon"] > 0:
        promise = (
            f"against the server and everyone else, epsilon {settings['dpsgd_epsilon']:g} at delta "
            f"{settings['dpsgd_delta']:g} for each example of a client (DP-SGD at the client)"
        )
        claims.append(ExternalClaim("example of a client", promise, "each client's own card"))
    if settings["client_clip"] > 0:
        promise = (
            f"against everyone but the server, each client as a whole, at noise multiplier "
            f"{settings['client_noise_multiplier']:g} of updates within {settings['client_clip']:g} and delta "
            f"{settings['client_delta']:g}"
        )
        claims.append(ExternalClaim("client", promise, "card.json"))
    return claims, flaws


def federated_sentences(settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Who has to be trusted in a federation of these settings, and what it does not protect."""
    trusted = ["each client for its own perturbation and training: the server sees adapters, not how they were made"]
    found = [
        "what every client's own card lists as not protected",
        "who took part, when, for how long, and with how many examples",
        "the choice of a round by held-out perplexity",
    ]
    if settings["perturbation"] != "none":
        found.append(
            "further runs: tokens are drawn once in this run, whatever the number of its rounds, but where a client does not "
            "keep its draws (state), they are drawn anew, at a second budget"
        )
    if settings["dpsgd_epsilon"] == 0:
        found.append("training losses that clients report")
    if settings["client_clip"] > 0:
        found.append(KEPT_BY_THE_SERVER)
        trusted.append(
            "the server, which sees every client's update before it adds noise, and keeps who was sampled secret"
        )
    return trusted, found


@dataclass(frozen=True)
class _Statement:
    """Of one mechanism: ``path=kind|kind|word`` of each field (``?`` where it may be null), units, and how sentences begin."""

    fields: str
    unit: str = ""
    sentences: Mapping[str, Sequence[str]] = field(default_factory=dict)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "digest": lambda value: isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None,
    "number": lambda value: type(value) in (int, float) and 0 <= value < math.inf,
    "count": lambda value: type(value) is int and value >= 0,
    "whole": lambda value: type(value) is int,
    "flag": lambda value: isinstance(value, bool),
    "list": lambda value: isinstance(value, list),
    "table": lambda value: isinstance(value, Mapping),
}
_MODEL = " model.fingerprint=digest model.processes=count "
_CLIPPING = (
    " mechanism.max_grad_norm=number|table mechanism.groups=string|list|table? mechanism.adaptive=table?" + _MODEL
)
_TRAINED = {"assumptions": [TRUST], "remaining": [AMONG_UNITS]}
_UNITS = r"example|user \(at most \d+ examples\)"
_PLACE = " mechanism.layer=string|whole mechanism.sequence_length=count mechanism.public_text=string|list"
_SEQUENCE_SENTENCES = {"unprotected": SEQUENCES, "notes": [LOCAL_GUARANTEE, "each inference query "]}
_TOKENS = _Statement(
    "mechanism.cti=table? mechanism.cti.form=prior|quotient|paper mechanism.cti.tilt=number? mechanism.cti.c0=number? "
    "mechanism.cti.cells=count? mechanism.cti.supported_tokens=count mechanism.cti.counts=string "
    "mechanism.cti.public_text=string|table? nats_per_distance=number? displacement.eta=number? "
    "displacement.unchanged=number displacement.mean_displacement=number displacement.tokens=count "
    "policy.unknown=perturb|refuse policy.kept=list vocabulary=count tokens_released=count tokens_kept=count",
    re.escape(ONE_TOKEN),
    {"unprotected": REPLACED_TOKENS, "assumptions": [PUBLIC_TABLE]},
)
#: Settings of a federation that say what is guaranteed, and of whom.
FEDERATED = (
    "model=string peft=bottleneck|lora rounds=count fraction=number perturbation=none|selective|all epsilon=number "
    "budget=token|text mechanism=local|typed|paper radius=number alpha=number replacement=uniform|model detector=string "
    "threshold=number client_clip=number client_noise_multiplier=number client_delta=number dpsgd_epsilon=number "
    "dpsgd_delta=number dpsgd_max_grad_norm=number"
)
_EWFT = _Statement(
    "mechanism.max_norm=number mechanism.noise_std_over_max_norm=list mechanism.reuse=flag mechanism.autoencoder=list? "
    "mechanism.autoencoder_trained_on=string? model.bottom=string" + _PLACE,
    ONE_SEQUENCE,
    _SEQUENCE_SENTENCES | {"sampling": [UNSAMPLED]},
)
_MECHANISMS: dict[str, _Statement] = {
    "DP-SGD": _Statement(_CLIPPING, _UNITS, _TRAINED),
    "DP-ZO": _Statement(
        "mechanism.max_slope=number mechanism.smoothing=number mechanism.seed=whole" + _MODEL, _UNITS, _TRAINED
    ),
    "Rap-FT": _Statement(
        "mechanism.mode=sound|paper mechanism.max_grad_norm=number mechanism.irrelevance_ratio=number "
        "mechanism.allocation=printed|optimal|axes mechanism.axes_power=number? mechanism.mask.kind=string "
        "mechanism.map_after=count mechanism.map_every=count? mechanism.propagation.epsilon=number "
        "mechanism.propagation.alpha=number mechanism.propagation.positive_after_activation=flag "
        "mechanism.initialisation.p=number mechanism.adaptive=table?" + _MODEL,
        _UNITS,
        _TRAINED,
    ),
    "DP-FROST": _Statement(
        "mechanism.mode=sound|paper mechanism.budget_ratio=number mechanism.choose_by=magnitudes|random "
        "mechanism.clipping_schedule=list? mechanism.noise_schedule=list? mechanism.gap_coefficient=number "
        "mechanism.partitions=list|table? mechanism.seed=whole mechanism.select_every=count? "
        "mechanism.selection_noise_multiplier=number? mechanism.selection_rate=number mechanism.selection_steps=count "
        "mechanism.unfreezing_ratio=number" + _CLIPPING,
        _UNITS,
        _TRAINED,
    ),
    "DP-Forward": _EWFT,
    "release once": _EWFT,
    "EWPBA as printed": _EWFT,
    "codebook": _Statement(
        "mechanism.cells=count mechanism.epsilon=number mechanism.kept=number mechanism.encoder=string? dataset_size=count "
        "released_records=count model.name=string model.trained_parameters=count" + _PLACE,
        ONE_SEQUENCE,
        _SEQUENCE_SENTENCES,
    ),
    "best of a secret number of DP-SGD runs": _Statement(
        "mechanism.max_grad_norm=number|table dataset_size=count model.name=string model.trained_parameters=count "
        "tuning.candidates=table tuning.expected_trials=number tuning.shape=number tuning.stop=number tuning.won=table "
        "tuning.noised_score=number tuning.noise_multiplier_of_a_step=number tuning.noise_multiplier_of_a_score=number",
        "example",
        {"assumptions": [TRUST], "unprotected": [SEARCH_TIME], "remaining": [AMONG_UNITS]},
    ),
    "private votes": _Statement(
        "mechanism.labels=list", "example", {"assumptions": [PUBLIC_CANDIDATES], "sampling": [EVERY_ROUND]}
    ),
    "laplace": replace(_TOKENS, fields=f"{_TOKENS.fields} eta=number"),
    "exponential": replace(_TOKENS, fields=f"{_TOKENS.fields} eta=number"),
    "quotient": replace(_TOKENS, fields=f"{_TOKENS.fields} epsilon_of_a_token=number"),
    "multivariate Laplace noise on hidden rows": _Statement(
        "mechanism.bottom_trained=flag eta=number rows_released=count",
        ONE_TEXT,
        {"unprotected": NOISED_ROWS, "assumptions": PUBLIC_BOTTOM},
    ),
    "selective perturbation": _Statement(
        "mechanism.form=local|typed|paper settings.mechanism=local|typed|paper settings.budget=token|text "
        "settings.epsilon=number settings.scope=private|all settings.detector=table settings.detector.name=string "
        "settings.policy.threshold=number settings.policy.whole_words=flag settings.policy.entities=list? "
        "settings.strengths=table settings.table=string settings.name=string settings.radius=number? settings.alpha=number? "
        "settings.max_length=count? tokens.private=count tokens.all=count tokens.texts=count mean_of_a_text=number "
        "detector_quality=table?",
        r"(the private tokens of each text together, each|each private token,) among all tokens of the vocabulary",
        {"unprotected": SELECTED_TOKENS, "notes": ["the detector's miss rate: "]},
    ),
    "federated fine-tuning": _Statement(
        " ".join(f"settings.{setting}" for setting in FEDERATED.split())
        + " clients=count rounds=count void_rounds=count updates=table? perplexity=list trusted=list",
        sentences={"unprotected": ["what every client's own card lists as not protected"]},
    ),
    "central DP federated averaging": _Statement(
        "mechanism.client_clip=number",
        "client",
        {
            "unprotected": [
                "everything against the server itself, which sees each update before the noise",
                KEPT_BY_THE_SERVER,
            ]
        },
    ),
}


def contradiction(card: Mapping[str, Any]) -> str | None:
    """Why a card does not state what its mechanism states, in one sentence; None if it does, or nothing is known of it."""
    name, listed = card["mechanism"]["name"], {*card["unprotected"]}
    drawn = card.get("synthetic", {"rows": 0, "sha256": 64 * "0", "statement": SYNTHETIC})
    if not (_fits(drawn, ["rows"], "count") and _fits(drawn, ["sha256"], "digest") and SYNTHETIC in drawn.values()):
        return "the card is malformed: its synthetic texts are not described"
    known = _MECHANISMS.get(name)
    if known is None:
        for other, statement in _MECHANISMS.items():
            if (mine := statement.sentences.get("unprotected")) and listed.issuperset(mine):
                return f"the card names the mechanism {quote(name)}, but states what {other} leaves unprotected"
        return None
    if known.sentences is _TRAINED:
        model = card.get("model", {})
        if "processes" not in model and not _KINDS["digest"](model.get("fingerprint")):
            # A statement by hand, not of a run of this package.
            return None
        if not card["weights"]:
            return "the card is malformed: it names no digest of the weights that it speaks of"
    for entry in known.fields.split():
        path, _, kinds = entry.partition("=")
        if not _fits(card, path.split("."), kinds):
            return f"the card is malformed: {path} is missing, or of the wrong type"
    if known.unit and "unit" in card and not re.fullmatch(known.unit, card["unit"]):
        return f"the card states the unit {quote(card['unit'])}, which {name} does not protect"
    for heading, sentences in known.sentences.items():
        for sentence in sentences:
            entries = card[heading] if isinstance(card[heading], list) else [card[heading]]
            if not any(str(entry).startswith(sentence) for entry in entries):
                return f"the card's {heading} lacks what {name} states: {sentence}"
    check = _CHECKS.get(name)
    return None if check is None else check(card)


def selection_of(card: Mapping[str, Any]) -> tuple[float, float, range] | None:
    """Rate, noise multiplier and possible numbers of the releases by which a run's mechanism chose parameters or their noise."""
    mechanism, spent = card["mechanism"], card["steps"]["spent"]
    if mechanism["name"] == "Rap-FT" and "mask" in mechanism:
        mask, after = mechanism["mask"], mechanism["map_after"]
        least, most = int(spent > after), int(spent >= after)
        rate, multiplier, again = mask.get("sample_rate"), mask.get("noise_multiplier"), mechanism["map_every"]
    elif mechanism["name"] == "DP-FROST" and mechanism.get("choose_by") == "magnitudes":
        rate, multiplier, again = (
            mechanism[name] for name in ("selection_rate", "selection_noise_multiplier", "select_every")
        )
        least = most = mechanism["selection_steps"]
    else:
        return None
    at_steps = (rate, multiplier) == (card["sample_rate"], card["noise_multiplier"])
    if not rate or not multiplier or at_steps:
        return None
    return rate, multiplier, range(least, 1 << 62 if again else most + 1)


def _fits(fields: Any, path: Sequence[str], kinds: str) -> bool:
    value = fields
    for key in path:
        if value is None and value is not fields:
            # The entry of the whole says whether it may be left out.
            return True
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    if value is None:
        return kinds.endswith("?")
    return any(_KINDS[kind](value) if kind in _KINDS else value == kind for kind in kinds.removesuffix("?").split("|"))


def _selective(card: Mapping[str, Any]) -> str | None:
    settings, tokens, budget = card["settings"], card["tokens"], card["budget"]
    shared = settings["budget"] == "text"
    most = 1 if shared else budget["units"]
    if card["unit"] != token_claim(settings["budget"], settings["epsilon"], most).unit:
        return f"the card's unit is not that of a budget of each {settings['budget']}"
    form = settings["mechanism"]
    own = settings["alpha"] is not None, settings["radius"] is None
    if settings["name"] != card["mechanism"]["name"] or own != (form == "paper", form == "typed"):
        return "the card's settings are not those of its mechanism"
    if form == "typed" and (
        settings.get("replacement") not in ("uniform", "model") or WITHIN_A_TYPE not in card["notes"]
    ):
        return "the card does not say how tokens of one type are replaced"
    if form == "paper" and not {*card["why_no_guarantee"]}.issuperset(PAPER_FLAWS):
        return "the card does not say why the paper's mechanism guarantees nothing"
    texts, private = tokens["texts"], tokens["private"]
    fits = private <= tokens["all"] and (budget["units"] or 0) <= private <= texts * (private if shared else most or 0)
    total, one = card["mean_of_a_text"] * texts, settings["epsilon"]
    spent = total <= one * min(private, texts) * (1 + ROOM) if shared else math.isclose(total, one * private)
    return None if fits and spent else "the card's counts of texts and private tokens contradict its bounds"


def _federated(card: Mapping[str, Any]) -> str | None:
    claims, flaws = federated_claims(card["settings"])
    trusted, unprotected = federated_sentences(card["settings"])
    stated = [] if card["kind"] == "none" else [card, *card["also"]]
    if len(stated) != len(claims):
        return "the card's claims are not those of its settings"
    for fields, claim in zip(stated, claims):
        if any(fields.get(key) != value for key, value in claim.to_json().items()):
            return f"the card's claim for {quote(fields['unit'])} is not that of its settings"
    if card["trusted"] != trusted or card["unprotected"] != [*(flaws if claims else ()), *unprotected]:
        return "the card's sentences are not those of its settings"
    rounds, central = len(card["perplexity"]), card["settings"]["client_clip"] > 0
    if (card["updates"] is None) != central or (UNCOUNTED in card["notes"]) != central:
        return "with central DP, and only then, a card does not say how many updates came"
    fits = card["rounds"] == rounds <= card["settings"]["rounds"] and card["void_rounds"] <= rounds
    return None if fits else "the card's counts of rounds contradict each other"


def _codebook(card: Mapping[str, Any]) -> str | None:
    mechanism = card["mechanism"]
    answered = math.exp(mechanism["epsilon"])
    if not math.isclose(mechanism["kept"], answered / (answered + mechanism["cells"] - 1), rel_tol=ROOM):
        return "the card's share of codes that are kept is not that of its cells and epsilon"
    fits = card["released_records"] <= card["dataset_size"]
    return None if fits else "the card states more released records than there are"


def _replaced(card: Mapping[str, Any]) -> str | None:
    name, form, cti = card["mechanism"]["name"], card["kind"], card["mechanism"]["cti"]
    if (name == "quotient") != (form == "pure") or (name == "quotient") != (cti is not None and cti["form"] == name):
        return f"the card's claim or its CTI is not that of the mechanism {name}"
    if cti is not None:
        if cti["counts"] not in ("public", "private", NOISED_COUNTS) or (cti["counts"] == NOISED_COUNTS) != bool(
            card["also"]
        ):
            return "the card's claims are not those of its counts"
        if any(claim["unit"] != COUNTED_TEXT for claim in card["also"]):
            return f"the unit of counts is not {COUNTED_TEXT!r}"
        own = {"tilt": "prior", "c0": "paper", "cells": "quotient"}
        if any((cti[setting] is not None) != (cti["form"] == of) for setting, of in own.items()):
            return f"the card's CTI has settings of another form than {cti['form']}"
    if card["nats_per_distance"] is not None and card["nats_per_distance"] != card["budget"]["of_a_unit"]:
        return "the card's nats_per_distance is not its bound"
    once = card["budget"]["releases"] == 1
    times = "each text is released once: " if once else f"no text is released more than {card['budget']['releases']} "
    if not any(entry.startswith(times) for entry in card["assumptions"]):
        return "the card does not assume the releases that its bound is of"
    return None if card["displacement"]["unchanged"] <= 1 else "the card states a share of tokens above 1"


def _relevance(card: Mapping[str, Any]) -> str | None:
    mechanism, mask = card["mechanism"], card["mechanism"]["mask"]
    if (mechanism["axes_power"] is not None) != (mechanism["allocation"] == "axes"):
        return "the card's axes_power is not that of its allocation"
    wanted = _MAPS.get(mask["kind"])
    fits = wanted is not None and mask.keys() - {"kind"} == {*wanted.split()}
    return None if fits else "the card's relevance map is not described as its kind is"


def _bottom(card: Mapping[str, Any]) -> str | None:
    void = TRAINABLE in card["why_no_guarantee"]
    return (
        None if void == card["mechanism"]["bottom_trained"] else "a trained bottom, and no frozen one, voids the card"
    )


#: What describes a relevance map of each kind.
_MAPS = {
    "public": "batches text",
    "public gradients": "batches text at_once",
    "noised": "noise_multiplier sample_rate max_norm",
    "private, not noised": "sample_rate",
}
_CHECKS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "Rap-FT": _relevance,
    "selective perturbation": _selective,
    "federated fine-tuning": _federated,
    "codebook": _codebook,
    **dict.fromkeys(("laplace", "exponential", "quotient"), _replaced),
    "multivariate Laplace noise on hidden rows": _bottom,
}
