"""`verify`: recompute a card's claims from its own fields, and compare it with weights and ledger where they are given."""

from __future__ import annotations

import json
import math
import os
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fastdp.accounting.card import (
    FORMAT,
    SYSTEM_KEY,
    UNPROTECTED,
    UNSAFE_KEY,
    VERSION,
    assumptions_of,
    digest,
    large_delta,
)
from fastdp.accounting.claim import ROOM, CheckedFigures, ExternalClaim, Gaussian, Pure, UnsupportedFigure, read_claim
from fastdp.accounting.events import CONSTANT, Flat, dpsgd_model, flatten
from fastdp.accounting.exports import read_export
from fastdp.accounting.journal import LedgerError, read as read_records
from fastdp.accounting.ledger import STEP, Ledger
from fastdp.accounting.page import ENVELOPE, claims
from fastdp.accounting.statements import GRID, contradiction, selection_of
from fastdp.accounting.weights import digests_of, model_files
from fastdp.untrusted import MAX_CARD, check_values, parse_json_object, quote, read_bytes

#: Required fields: of every card, of schema version 2, of a claim of an epsilon, and of a run that trained a model.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "guarantee": str,
    "why_no_guarantee": list,
    "mechanism": dict,
    "noise_source": dict,
    "digest": str,
}
_SECOND: dict[str, type | tuple[type, ...]] = {
    **{"kind": str, "created": str, "software": dict, "also": list},
    **{"assumptions": list, "unprotected": list, "notes": list, "remaining": list},
    **{"run_id": (str, type(None)), "ledger_head": (str, type(None)), "weights": (list, type(None))},
}
_GAUSSIAN: dict[str, type | tuple[type, ...]] = {"unit": str, "adjacency": str, "epsilon": dict, "event": dict}
_RUN: dict[str, type | tuple[type, ...]] = {
    "sampling": str,
    "dataset_size": int,
    "noise_multiplier": (int, float),
    "steps": dict,
    "model": dict,
}
#: Forms of cards in 0.1.0 that are not read any more.
_OLD_FORMATS = ("fastdp.selective-card", "fastdp.statement", "fastdp.federated-run-card")
_SAMPLINGS = ("poisson", "shuffled")
#: Most claims beside the first: each is worked out again, and a card states a few.
_MOST_CLAIMS = 16
#: Figures that claims of some kinds state, and pages show.
_FIGURES = {
    "gaussian": {"epsilon", "membership", "event"},
    "pure": {"budget", "bound"},
    "metric": {"budget", "bound", "distance"},
}
#: What a ledger's header and a card both state.
_IN_BOTH = ("unit", "adjacency", "sampling", "sample_rate", "dataset_size", "noise_multiplier")
#: Further fields of claims and runs that are worked out again or compared.
_CLAIMED = ("kind", "membership", "budget", "bound", "distance", "sample_rate", "files", "earlier_releases")
#: What a ledger's header alone states.
_BEGUN_WITH = ("mechanism", "flaws", "unchecked_records", "noise_rounds", "shapes", "fingerprint")
#: Prefixes of a ledger's notes that are expected after the card: digests of a preparation's outcome, or of the data.
_OUTCOMES = ("preparation-", "data")


@dataclass(frozen=True)
class VerificationResult:
    """What `verify` found; true if the claim holds.

    Attributes:
        holds: the card is intact and claims no less than what it holds costs.
        guarantee: it holds, and the card does claim a guarantee whose figure was worked out again.
        claimed: the first claim's bound on the card; None if it states none or could not be read.
        recomputed: the same worked out again; None if it was not reached.
        reason: one sentence.
        unchecked: what nobody looked at, in words.
    """

    holds: bool
    guarantee: bool
    claimed: float | None
    recomputed: float | None
    reason: str
    unchecked: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.holds


class _Refused(ValueError):
    """A card that is not worth recomputing."""


def verify(
    card: Mapping[str, Any] | str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | None = None,
    ledger: str | os.PathLike[str] | None = None,
) -> VerificationResult:
    """Work a card's figures out again.

    Args:
        card: a `Card`, its dict, its JSON text, or the path of its JSON file or of what `export` made of it.
        weights: folder or safetensors file that should hold what the card speaks of.
        ledger: the run's ledger file.

    A card that is malformed, altered, of another schema version or inconsistent does not hold. Nor does one that weights or
    ledger contradict. The reason says so.

    Raises:
        FileNotFoundError: for a path that is not there.

    >>> from fastdp.accounting import Card, Gaussian, dpsgd, verify
    >>> claim = Gaussian("example", "add_remove", dpsgd(2.0, 0.1, 10), 1e-5)
    >>> card = Card.of(claim, mechanism="DP-SGD", noise_source={})
    >>> verify(card).holds, verify({**card, "delta": 1e-9}).holds
    (True, False)
    """
    claimed = recomputed = None
    unchecked: tuple[str, ...] = ()
    for path in (weights, ledger):
        if path is not None and not Path(path).exists():
            raise FileNotFoundError(f"{path}: no such file or folder; check the name")
    try:
        parsed, caveats = _parsed(card)
        fields = _fields(parsed)
        found = _check_claims(fields)
        if found:
            claimed, recomputed = found[0].claimed, found[0].recomputed
        if weights is not None:
            _check_weights(fields, Path(weights))
        if ledger is not None:
            caveats += _check_ledger(fields, Path(ledger))
        unchecked = (*_unchecked(fields, weights is not None, ledger is not None), *caveats)
    except UnsupportedFigure as error:
        return VerificationResult(False, False, error.claimed, error.recomputed, str(error))
    except (KeyError, AttributeError, IndexError) as error:
        return VerificationResult(False, False, claimed, recomputed, f"the card is malformed: {quote(error)}")
    except (ValueError, TypeError, OverflowError, LedgerError) as error:
        return VerificationResult(False, False, claimed, recomputed, str(error))
    if fields["guarantee"] == "none":
        reasons = "; ".join(map(str, fields["why_no_guarantee"])) or "it gives no reason"
        reason = f"the card claims no guarantee: {reasons}"
        return VerificationResult(True, False, claimed, recomputed, reason, unchecked)
    reason = "; ".join(each.reason for each in found)
    certified = any(each.recomputed is not None for each in found)
    return VerificationResult(True, certified, claimed, recomputed, reason, unchecked)


def _parsed(card: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[Mapping[str, Any], list[str]]:
    """The card's fields, and what cannot be checked in the format that it came in (an export leaves fields out)."""
    if isinstance(card, Mapping):
        return card, []
    text = card if isinstance(card, str) and card.lstrip().startswith(("{", "[")) else read_bytes(card, MAX_CARD)
    try:
        if isinstance(text, bytes) and (found := read_export(text.decode(errors="replace"))) is not None:
            return found
        return parse_json_object(text), []
    except ValueError as error:
        said = "it holds no JSON: give card.json of a run" if isinstance(error, json.JSONDecodeError) else str(error)
        raise _Refused(f"this is not a card: {said}") from None


def _fields(card: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a card whose form and digest are as they should be."""
    if card.get("format") in _OLD_FORMATS:
        raise _Refused(f"cards of the form {card['format']!r} are no longer read: write it anew with this version")
    if card.get("format") != FORMAT:
        raise _Refused(f"this is not a card: its format is not {FORMAT!r}")
    if type(card.get("version")) is not int or card["version"] not in (1, VERSION):
        raise _Refused(f"the card has schema version {card.get('version')!r}; this package reads 1 and {VERSION}")
    if card["version"] == 1 and "kind" in card:
        raise _Refused("the card is malformed: it is of schema version 1, which has no kind of claim")
    wanted = _FIELDS | (_SECOND if card["version"] == VERSION else {})
    if card.get("kind", Gaussian.kind) == Gaussian.kind:
        wanted |= _GAUSSIAN
        # Every card of the first version was of a run; a later one may speak of its data alone.
        wanted |= _RUN if card["version"] == 1 or {"steps", "sampling", "noise_multiplier"} & card.keys() else {}
    for name, kind in wanted.items():
        if name not in card or not isinstance(card[name], kind) or card[name] == "" or isinstance(card[name], bool):
            raise _Refused(f"the card is malformed: {name} is missing or of the wrong type")
    if card["digest"] != digest(card):
        raise _Refused("the card was altered after it was written: its digest does not match")
    _check_facts(card)
    return card


def _check_claims(card: Mapping[str, Any]) -> list[CheckedFigures]:
    """Recompute the figures of every claim. A card without a guarantee may state some too, and they may be wrong."""
    void = card["guarantee"] == "none"
    if not void:
        if card["noise_source"].get("key") == UNSAFE_KEY:
            raise _Refused("the card claims a guarantee for noise from a reproducible key")
        if card["why_no_guarantee"]:
            raise _Refused("the card claims a guarantee and gives reasons why there is none")
    if card.get("kind") == "none":
        if void:
            return []
        raise _Refused("the card claims a guarantee but holds no claim")
    also = card.get("also", [])
    if not all(isinstance(fields, Mapping) for fields in also) or len(also) > _MOST_CLAIMS:
        raise _Refused(f"the card is malformed: also is no list of at most {_MOST_CLAIMS} claims")
    found = []
    for number, fields in enumerate((card, *also)):
        if card["version"] == VERSION and "kind" not in fields:
            raise _Refused("the card is malformed: a claim of it has no kind")
        claim = read_claim(fields)
        if not void and not number and card["guarantee"] != claim.guarantee:
            raise _Refused(f"the card names its guarantee {card['guarantee']!r}, but its claim is {claim.guarantee!r}")
        if foreign := set().union(*_FIGURES.values()) & fields.keys() - _FIGURES.get(claim.kind, set()):
            raise _Refused(f"the card states {min(foreign)}, which no claim of its kind gives")
        if isinstance(claim, Gaussian):
            # A card may leave the number of units out. At least two are assumed: with one there is nothing to protect.
            units = max(fields.get("dataset_size", 2), 2)
            if not void and claim.delta is not None and claim.delta >= 1 / units:
                raise _Refused(large_delta(claim.delta, units))
            if "steps" in fields:
                _check_run(fields, flatten(claim.event))
        try:
            found.append(claim.check(fields))
        except UnsupportedFigure as error:
            if not void:
                raise
            found.append(CheckedFigures(error.claimed, error.recomputed, str(error)))
    return found


def _check_facts(card: Mapping[str, Any]) -> None:
    """Refuse facts of a card that others of its fields contradict."""
    budget, mechanism, settings = card.get("budget") or {}, card["mechanism"], card.get("settings") or {}
    if not isinstance(mechanism.get("name"), str) or not mechanism["name"]:
        raise _Refused("the card is malformed: its mechanism has no name")
    if not all(isinstance(each, str) for each in card.get("weights") or ()):
        raise _Refused("the card is malformed: its weights are no digests")
    of_a_unit = budget.get("of_a_unit")
    eta, displaced = card.get("eta", of_a_unit), (card.get("displacement") or {}).get("eta")
    if displaced not in (None, eta):
        raise _Refused(f"the card states displacement {quote(displaced)}, but eta {quote(eta)}")
    figures = {
        "eta": None if card.get("nats_per_distance") else eta,
        "epsilon_of_a_token": card.get("epsilon_of_a_token"),
        "mechanism": mechanism.get("epsilon"),
        "settings": settings.get("epsilon") if settings.get("name", mechanism["name"]) == mechanism["name"] else None,
    }
    for name, stated in figures.items() if of_a_unit is not None else ():
        if stated is not None and stated != of_a_unit:
            raise _Refused(f"the card states {name} {quote(stated)}, but the bound of a unit is {of_a_unit!r}")
    if settings.get("mechanism", mechanism.get("form")) != mechanism.get("form", settings.get("mechanism")):
        raise _Refused("the card states two forms of its mechanism")
    if card["version"] == VERSION:
        _check_form(card)
    source = card["noise_source"]
    known = source.get("generator") in ("ChaCha20", "ChaCha12") and source.get("key") == SYSTEM_KEY
    if (source or of_a_unit is not None) and source.get("key") != UNSAFE_KEY and not known:
        raise _Refused("the card is malformed: its noise_source names no generator and key that this package has")


def _check_form(card: Mapping[str, Any]) -> None:
    """Refuse names, digests and dates that are none, and what a card of its mechanism must state."""
    digests = {"ledger_head": [card["ledger_head"]], "weights": card["weights"] or ()}
    for name, found in digests.items():
        if not all(each is None or re.fullmatch(r"[0-9a-f]{64}", str(each)) for each in found):
            raise _Refused(f"the card is malformed: {name} is no digest")
    try:
        datetime.fromisoformat(card["created"])
    except ValueError:
        raise _Refused("the card is malformed: created is no date") from None
    software = card["software"]
    if not {"python", "fastdp"} <= software.keys() or not all(
        re.match(r"\d|sha256:", str(v)) for v in software.values()
    ):
        raise _Refused("the card is malformed: its software names no versions")
    if (reason := contradiction(card)) is not None:
        raise _Refused(reason)


def _check_run(card: Mapping[str, Any], flat: Flat) -> None:
    """Whether the event holds the steps that the card states, and the card what follows from its fields."""
    spent, rate, multiplier = card["steps"].get("spent"), card.get("sample_rate"), card["noise_multiplier"]
    if isinstance(spent, bool) or not isinstance(spent, int) or spent < 0:
        raise _Refused("the card is malformed: its spent steps are not a count")
    if card["version"] == VERSION:
        _check_stated(card)
        if card["sampling"] not in _SAMPLINGS:
            _check_unsampled(card, flat)
    if not flat.private or card["sampling"] not in _SAMPLINGS or rate is None:
        return
    if not (0 < rate <= 1 and multiplier > 0):
        raise _Refused(f"the card states {quote(rate)} as its sample rate and {quote(multiplier)} as noise multiplier")
    factors = tuple((step, factor) for step, factor in card["mechanism"].get("noise_schedule") or CONSTANT)
    stated = dpsgd_model(multiplier, rate, card["sampling"], math.ceil(1 / rate - 1e-9), factors)
    wanted = flatten(stated.event(spent))
    # By rising multiplier on both sides, as all are of one rate. No release counts for two multipliers.
    releases = deque(sorted((z, count) for q, z, count in flat.sampled if math.isclose(q, rate)))
    for _, level, needed in wanted.sampled:
        counted = 0
        while releases and (releases[0][0] < level or math.isclose(releases[0][0], level)):
            z, count = releases.popleft()
            counted += count if math.isclose(z, level) else 0
        if counted < needed:
            raise _Refused(f"the card states {needed} steps, but its event holds {counted} at that rate and multiplier")
    if flat.mu_squared < wanted.mu_squared * (1 - ROOM):
        raise _Refused(f"the card states {spent} steps, but its event holds fewer at that multiplier")
    # Curves that a run released besides are not sampled.
    held, needed = (sum(count for _, _, count in own.sampled) for own in (flat, wanted))
    if card["mechanism"]["name"] == "DP-SGD" and held > needed:
        raise _Refused(f"the card states {spent} steps, but its event holds {held}")
    if (selection := selection_of(card)) is not None:
        rate, multiplier, counts = selection
        held = sum(n for q, z, n in flat.sampled if math.isclose(q, rate) and math.isclose(z, multiplier))
        if held not in counts:
            raise _Refused(
                f"the card states a selection at noise multiplier {multiplier:g}, which its event does not hold"
            )


def _check_unsampled(card: Mapping[str, Any], flat: Flat) -> None:
    """Refuse a run without sampling whose steps, at the multipliers that it states, are not the releases of its event."""
    steps, multiplier = card["steps"], card["noise_multiplier"]
    levels = card["mechanism"].get("noise_std_over_max_norm", [multiplier] * steps["planned"])
    if card["sample_rate"] is not None or flat.sampled:
        raise _Refused(f"the card states a sample rate, but {quote(card['sampling'])} as its sampling")
    if multiplier not in levels or len(levels) != steps["planned"]:
        raise _Refused("the card's noise multiplier and planned steps are not those of its noise")
    if not flat.private:
        return
    costs = sorted(1 / level**2 for level in levels)
    least, most = sum(costs[: steps["spent"]]), sum(costs[len(costs) - steps["spent"] :])
    if not least * (1 - ROOM) <= flat.mu_squared <= most * (1 + ROOM):
        raise _Refused(f"the card states {steps['spent']} steps, but its event holds others at its multipliers")


def _check_stated(card: Mapping[str, Any]) -> None:
    """Refuse a run's card that lacks a fact, or a sentence that follows from its facts."""
    steps, model, source = card["steps"], card["model"], card["noise_source"]
    planned = steps.get("planned")
    if type(planned) is not int or planned < steps["spent"]:
        raise _Refused("the card is malformed: its planned steps are no count, or fewer than the spent ones")
    if source.get("key") == SYSTEM_KEY and not isinstance(source.get("secure_rounding"), bool):
        raise _Refused("the card is malformed: noise_source says nothing of secure_rounding")
    sampled = card["sampling"] in _SAMPLINGS
    # A model behind an API, or a frozen one, has no trained parameters.
    counts = [model.get("trained_parameters"), model.get("processes", 1)]
    if not isinstance(model.get("name"), str) or any(type(count) is not int or count < sampled for count in counts):
        raise _Refused("the card is malformed: its model lacks a name or a count of parameters or processes")
    if not isinstance(card.get("sample_rate", ""), (int, float) if sampled else (int, float, type(None))):
        raise _Refused("the card is malformed: sample_rate is missing or of the wrong type")
    facts = (card["sampling"], card["adjacency"], card["dataset_size"])
    follows = assumptions_of(*facts, source)
    if set(card["assumptions"]) & {*assumptions_of(*facts, {})} - {*follows}:
        raise _Refused("the card assumes what its secure_rounding makes needless")
    if source.get("secure_rounding") and not any(str(each).startswith(GRID) for each in card["remaining"]):
        raise _Refused(f"the card's remaining lacks what its secure_rounding says: {GRID}...")
    for name, sentences in (("assumptions", follows), ("unprotected", UNPROTECTED)):
        if lacking := [sentence for sentence in sentences if sentence not in card[name]]:
            raise _Refused(f"the card's {name} lack what its fields say: {lacking[0]}")


def _check_weights(card: Mapping[str, Any], folder: Path) -> None:
    named = card.get("weights")
    if not named:
        raise _Refused("the card holds no digest of weights, so it cannot be told whether these are the ones")
    sizes = digests_of(folder)
    held = sizes.keys()
    missing = set(named) - held
    if missing:
        raise _Refused(f"{len(missing)} of the {len(set(named))} tensors that the card speaks of are not in {folder}")
    trained = card["model"].get("trained_parameters") if "processes" in card.get("model", ()) else None
    if trained is not None and trained != sum(map(sizes.__getitem__, named)):
        raise _Refused(f"the card speaks of {trained:,} trained parameters, but its weights have another number")
    if stated := card.get("files"):
        _check_files(stated, folder)


def _check_files(stated: Mapping[str, str], folder: Path) -> None:
    """Refuse a folder whose files of weights, or whose adapter's config, are not those that the card was bound to."""
    if folder.is_file():
        return
    place = next(
        (each for each in (folder, folder / "adapter", folder / "model") if (each / min(stated)).exists()), folder
    )
    found = model_files(place)
    for name in sorted(found.keys() | stated.keys()):
        if found.get(name) != stated.get(name):
            what = "is not there" if name not in found else "is no file of it" if name not in stated else "was changed"
            raise _Refused(f"the card speaks of the files of {place}, of which {name} {what}")


def _check_ledger(card: Mapping[str, Any], path: Path) -> list[str]:
    """Refuse a ledger that is not this card's; returns what it leaves open."""
    check_values(read_bytes(path))
    ledger, history = Ledger.read(path), read_records(path)
    if card.get("run_id") != ledger.run_id:
        raise _Refused(f"{path} is the ledger of another run than the card's")
    head = card.get("ledger_head")
    if head is None and card["version"] == VERSION:
        raise _Refused(f"the card does not say at which record of {path} it was written")
    if head is not None and not ledger.holds(head):
        raise _Refused(f"{path} does not hold the record that the card was written at: it was cut back or replaced")
    for key in _IN_BOTH:
        if key in card and key in ledger.header and card[key] != ledger.header[key]:
            raise _Refused(f"the card states {key} {card[key]!r}, but the ledger was begun with {ledger.header[key]!r}")
    _check_described(card, ledger.header)
    left = []
    event = next((c.event for c in map(read_claim, claims(card)) if isinstance(c, Gaussian)), None)
    if event is None or not _covers(flatten(event), flatten(ledger.event())):
        if ledger.closed_in_order:
            raise _Refused(f"{path} counts releases that the card's event does not hold")
        left.append("releases that the ledger had reserved and may not have made: it was not closed")
    written = len(history.bodies) if head is None else history.digests.index(head) + 1
    # Without sampling each level of noise is a kind of its own.
    kinds = [STEP] if card.get("sampling") in _SAMPLINGS else list(ledger.kinds)
    counts = {"planned": sum(map(ledger.budget, kinds)), "spent": sum(map(ledger.spent, kinds))}
    ended = ledger.closed_in_order and all(body["record"] in ("close", "note") for body in history.bodies[written:])
    if ended and "steps" in card and card["steps"] != counts:
        raise _Refused(f"the card states the steps {card['steps']}, but the ledger counts {counts}")
    if isinstance(ledger.header.get("mechanism"), str):
        lacking = sorted(card["mechanism"].keys() - ledger.header.keys() - {"name"})
        if lacking:
            left.append(f"settings of the mechanism that the ledger does not hold: {', '.join(map(quote, lacking))}")
    return left + [
        f"what the ledger notes after the card was written: {body['name']} ({body['digest']})"
        for body in history.bodies[written:]
        if body["record"] == "note" and not body["name"].startswith(_OUTCOMES)
    ]


def _check_described(card: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    begun, stated = header.get("mechanism"), card["mechanism"]
    if begun is not None and begun != (stated if isinstance(begun, dict) else stated.get("name")):
        raise _Refused("the card states another mechanism than the ledger was begun with")
    for key in header.keys() - card.keys() - {*_BEGUN_WITH}:
        if stated.get(key) != header[key]:
            found = quote(stated.get(key))
            raise _Refused(f"the card states {key} {found}, but the ledger was begun with {header[key]!r}")
    model = card.get("model")
    for key in ("fingerprint", "name"):
        known = header.get("fingerprint" if key == "fingerprint" else "model")
        stands = isinstance(model, Mapping) and (key in model or (key == "fingerprint" and card["version"] == VERSION))
        if known is not None and stands and (model or {}).get(key) != known:
            raise _Refused(f"the card states another model than the ledger was begun with: its {key} differs")


def _covers(stated: Flat, counted: Flat) -> bool:
    """Whether an event holds at least the releases of another."""
    if stated.mu_squared < counted.mu_squared * (1 - ROOM) or (stated.private and not counted.private):
        return False
    if any(counted.choices.count(choice) > stated.choices.count(choice) for choice in counted.choices):
        return False
    held = {(rate, multiplier): count for rate, multiplier, count in stated.sampled}
    return all(held.get((rate, multiplier), 0) >= count for rate, multiplier, count in counted.sampled)


def _unchecked(card: Mapping[str, Any], weights: bool, ledger: bool) -> list[str]:
    """What a reader has to take on trust, in words."""
    found = ["who wrote the card: its digest finds accidents and is no signature"]
    if any(isinstance(claim, Gaussian) for claim in map(read_claim, claims(card))):
        found.append("that the run drew its samples and its noise as the event says")
    if any(isinstance(claim, Pure) for claim in map(read_claim, claims(card))):
        found.append("that the draws were made by the mechanism and with the settings that the card states")
    for fields in claims(card):
        delta = fields["epsilon"]["delta"] if "epsilon" in fields else None
        if delta is not None and "dataset_size" not in fields:
            found.append(
                f"whether delta {delta:g} is below one over the number of units, which the card does not state"
            )
    for claim in map(read_claim, claims(card)):
        if isinstance(claim, ExternalClaim):
            found.append(f"what {claim.card} certifies: {claim.promise}")
    rests = {*ENVELOPE, *_GAUSSIAN, *(_RUN.keys() - {"model"} if "steps" in card else ()), *_CLAIMED}
    described = ["created", "software", *([] if ledger else ["mechanism", "run_id"]), *sorted(card.keys() - rests)]
    described += ["target"] * ("epsilon" in card)
    if "steps" in card and not ledger:
        unsampled = "event" in card and flatten(read_claim(card).event).mu_squared > 0  # type: ignore[attr-defined]
        described += ["steps", "noise_multiplier"] if unsampled else ["planned"]
    stated = ", ".join(map(quote, described))
    found.append(f"what its maker states, and nothing here recomputes: {stated}, and sentences that no field implies")
    if earlier := card.get("earlier_releases"):
        found.append(f"what {len(earlier)} earlier releases of the same data cost: their cards add to this one's")
    if not weights and "model" in card:
        known = "give them to compare them" if card.get("weights") else "the card holds no digest of them"
        found.append(f"which weights it speaks of: {known}")
    if weights and card.get("weights") and not card.get("files"):
        found.append("the adapter's config, and whether files were added: the card holds no digest of them")
    if not ledger and card.get("run_id") is not None:
        found.append("unit, number of units, model and releases against the run's ledger: give it to compare them")
    return found
