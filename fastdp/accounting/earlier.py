"""Cards of earlier forms, as fields of today's, so that they are read and verified as far as they say enough."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fastdp.accounting.claim import Claim, Elsewhere, Gaussian, Metric, Pure
from fastdp.accounting.serialisation import deserialise

_UNITS = {
    "partition": "each private token, among the tokens of its public cell",
    "local": "each private token, among all tokens of the vocabulary",
    "metric": "each private token, among all tokens of the vocabulary",
}


def translate(card: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of a card of an earlier form, or None for what is none. Raises ValueError where they cannot be read."""
    form = _FORMS.get(str(card.get("format")))
    if form is None:
        return None
    try:
        claims = form(card)
        void = list(card["no_guarantee" if "no_guarantee" in card else "why_no_guarantee"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"the card is malformed: {error!r}") from None
    if not claims and not void:
        raise ValueError("the card claims nothing, and does not say why")
    none = not claims or (bool(void) and card.get("guarantee") == "none")
    return {
        "guarantee": "none" if none else claims[0].guarantee,
        "why_no_guarantee": void if none else [],
        "mechanism": dict(card.get("mechanism") or card["settings"]),
        "noise_source": {},
        **(claims[0].to_json(False) if claims else {"kind": "none"}),
        "also": [each.to_json(False) for each in claims[1:]],
    }


def _selective(card: Mapping[str, Any]) -> list[Claim]:
    settings, budget = card["settings"], card["budget"]
    one = float(settings["epsilon"])
    units = round(budget["largest_of_a_text"] / one)
    if settings["mechanism"] == "metric":
        return [Metric(_UNITS["metric"], one, units, budget["releases"], "the distance of the tokens' rows")]
    return [Pure(_UNITS.get(settings["mechanism"], "each private token"), one, units, budget["releases"])]


def _statement(card: Mapping[str, Any]) -> list[Claim]:
    form = re.fullmatch(r"exp\((?:(\S+) \* )?(.*?)\)(?:: .*)?", card["bound"])
    factor = float(form[1] or 1) if form else float(card["eta"])
    distance = form[2] if form else card["bound"]
    releases = int(card.get("releases_of_a_text", 1))
    found: list[Claim] = [Metric(card["unit"], factor / releases, None, releases, distance)]
    if card.get("event_of_counts") is not None:
        counts = card["epsilon_of_counts"]
        found.append(Gaussian(counts["unit"], "add_remove", deserialise(card["event_of_counts"]), counts["delta"]))
    return found


def _federated(card: Mapping[str, Any]) -> list[Claim]:
    return [
        Elsewhere("see the promise", str(promise), "the clients' and the server's own cards")
        for promise in card["promises"]
    ]


_FORMS: dict[str, Callable[[Mapping[str, Any]], list[Claim]]] = {
    "fastdp.selective-card": _selective,
    "fastdp.statement": _statement,
    "fastdp.federated-run-card": _federated,
}
