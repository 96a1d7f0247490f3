"""Whether a card says all that one of its kind must say, and whether what it says beside its bound follows from its event."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from fastdp.accounting.card import UNPROTECTED, UNSAFE_KEY, assumptions_of
from fastdp.accounting.claim import ROOM, Gaussian
from fastdp.accounting.events import CONSTANT
from fastdp.accounting.page import ENVELOPE

#: How the sentence on rounding begins, which every card of the second version has whose noised sums were rounded.
ROUNDED = "noised sums are rounded"
#: How the sentence on the shapes of microbatches begins, by whose they are: a card of `make_private` whose method clips has one.
SHAPES = {
    "public": "one unit changes no bit of another's gradient",
    "own": "products round by the shape of their microbatch",
}
_LISTS = ("assumptions", "unprotected", "notes", "remaining", "why_no_guarantee")
_RUN = ("sampling", "dataset_size", "noise_multiplier", "steps")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_complete(card: Mapping[str, Any]) -> None:
    """Check the fields of a card of the second version.

    Raises:
        ValueError: naming what is missing, or of a form that no card has.
    """
    missing = [name for name in (*ENVELOPE, "kind") if name not in card]
    if type(card["version"]) is not int:
        missing.append("version")
    missing += [name for name in _LISTS if not isinstance(card.get(name), list)]
    missing += ["software"] * (not isinstance(card.get("software"), dict) or not card["software"])
    missing += ["created"] * (not _is_time(card.get("created")))
    missing += ["ledger_head"] * (card.get("ledger_head") is not None and not _is_digest(card["ledger_head"]))
    if (weights := card.get("weights")) is not None and not (
        isinstance(weights, list) and weights and all(map(_is_digest, weights)) and weights == sorted(weights)
    ):
        missing.append("weights")
    if any(name in card for name in ("sampling", "sample_rate", "steps")):
        missing += [name for name in (*_RUN, "model", "sample_rate") if name not in card]
    if missing:
        raise ValueError(f"the card is malformed: {missing[0]} is missing or of the wrong type")
    if "steps" in card:
        counts = [card["steps"].get(name) for name in ("planned", "spent")]
        if not all(type(count) is int for count in counts) or not 0 <= counts[1] <= counts[0]:
            raise ValueError("the card is malformed: its planned and spent steps are not counts in order")


def check_figures(card: Mapping[str, Any], claim: Gaussian) -> None:
    """Check what stands beside the bound of a guarantee: how it was computed, what it means, and the noise of a step.

    Raises:
        ValueError: naming what does not follow from the event.
    """
    stated, found = card["epsilon"], claim.to_json(cross_check=bool(card["epsilon"].get("cross_checks")))
    for name in ("accountant", "grid"):
        if not _alike(stated.get(name), found["epsilon"][name], 1e-9):
            raise ValueError(f"the card's {name} of epsilon is {stated.get(name)!r}, but its event gives another")
    if "target" not in stated or not isinstance(stated.get("cross_checks"), dict):
        raise ValueError("the card is malformed: epsilon lacks its target or its cross-checks")
    _check_equal("epsilon", stated.get("upper_bound"), found["epsilon"]["upper_bound"], ROOM)
    _check_all("membership", card.get("membership"), found["membership"], ROOM)
    # PRV rounds otherwise on another machine.
    _check_all("cross-check", stated["cross_checks"], found["epsilon"]["cross_checks"], 1e-3)
    if "steps" not in card:
        return
    _check_run(card)
    if card["steps"]["spent"] and card["noise_multiplier"]:
        _check_step(card)


def _check_run(card: Mapping[str, Any]) -> None:
    source = card["noise_source"]
    if not re.fullmatch(r"ChaCha(8|12|20)", str(source.get("generator"))):
        raise ValueError("the card is malformed: its noise comes from no generator that is known")
    if source.get("key") not in ("operating system", UNSAFE_KEY):
        raise ValueError("the card is malformed: the key of its noise is none that is known")
    if (source.get("secure_rounding") is True) != any(str(entry).startswith(ROUNDED) for entry in card["remaining"]):
        raise ValueError("the card does not say what the rounding of noised sums leaves, as every such card does")
    clipped = "fingerprint" in card["model"] and "max_grad_norm" in card["mechanism"]
    if clipped and sum(str(entry).startswith((*SHAPES.values(),)) for entry in card["remaining"]) != 1:
        raise ValueError("the card does not say, once, what one unit's shape does to the others, as such cards do")
    for heading, needed in (
        ("assumptions", assumptions_of(card["sampling"], card["adjacency"], card["dataset_size"], source)),
        ("unprotected", UNPROTECTED),
    ):
        if lacking := [sentence for sentence in needed if sentence not in card[heading]]:
            raise ValueError(f"the card lacks a sentence under {heading}: {lacking[0]}")


def _check_step(card: Mapping[str, Any]) -> None:
    """Rate and noise of a step are those of one in the event."""
    event = card["event"]
    rates = list(_all(event, "sampling_probability"))
    if rates and card["sampling"] != "poisson":
        raise ValueError("the card says that units were not sampled, but its event was of samples")
    if card["sampling"] not in ("poisson", "shuffled"):
        return
    factors = [factor for _, factor in card["mechanism"].get("noise_schedule") or CONSTANT]
    wanted = [card["noise_multiplier"] * factor for factor in factors]
    if not any(_alike(found, each, 1e-9) for found in _all(event, "noise_multiplier") for each in wanted):
        raise ValueError(
            f"the card states the noise multiplier {card['noise_multiplier']!r}, but its event has no such step"
        )
    if rates and not any(_alike(found, card["sample_rate"], 1e-9) for found in rates):
        raise ValueError(f"the card states the sample rate {card['sample_rate']!r}, but its event has no such step")


def _all(value: Any, name: str) -> Iterator[Any]:
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _all(each, name)
    if isinstance(value, dict) and name in value:
        yield value[name]


def _check_all(what: str, stated: Any, found: Mapping[str, Any], room: float) -> None:
    if not isinstance(stated, dict) or stated.keys() != found.keys():
        raise ValueError(f"the card is malformed: {what} lacks a figure, or has one too many")
    for name, value in found.items():
        _check_equal(f"{what} {name}", stated[name], value, room)


def _check_equal(what: str, stated: Any, found: Any, room: float) -> None:
    if not _alike(stated, found, room):
        raise ValueError(f"the card states {what} as {stated!r}, but its event gives {found!r}")


def _alike(stated: Any, found: Any, room: float) -> bool:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (stated, found))
    return math.isclose(stated, found, rel_tol=room, abs_tol=1e-12) if numbers else stated == found


def _is_time(value: Any) -> bool:
    try:
        datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None
