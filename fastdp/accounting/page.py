"""A card in words: the Markdown page beside its JSON, and the sentences that other forms of it share."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from fastdp.accounting.claim import Gaussian, Pure, read_claim, rounded_up, without_article
from fastdp.untrusted import escape_all, escape_markdown

#: What a card has besides its claim and its facts.
ENVELOPE = (
    *("format", "version", "created", "run_id", "guarantee", "why_no_guarantee", "also", "mechanism", "noise_source"),
    *("assumptions", "unprotected", "notes", "remaining", "weights", "ledger_head", "software", "digest"),
)
#: Headings of what a reader must know, and where it stands.
_LISTS = (
    ("Assumed", "assumptions"),
    ("What remains", "remaining"),
    ("Not protected", "unprotected"),
    ("Notes", "notes"),
)
#: What no verification makes out.
STATED = "Other settings, names and counts are its maker's statements."
#: More entries than this get a section of their own.
_INLINE = 8


def claims(card: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The fields of each claim, the first first; of a card that nobody has checked yet, too."""
    return [] if card.get("kind") == "none" else [card, *card.get("also", ())]


def headlines(card: Mapping[str, Any]) -> list[str]:
    """What is promised, a sentence a claim; or why nothing is."""
    if card["guarantee"] == "none":
        return [f"no guarantee: {reason}" for reason in card["why_no_guarantee"]]
    return ["".join(read_claim(fields).headline(fields)) for fields in claims(card)]


def mechanism_sentence(card: Mapping[str, Any]) -> str:
    """What was done to the data, as a sentence: of steps, of perturbations, or the mechanism's name alone."""
    settings, unit = card["mechanism"], without_article(card.get("unit", "unit"))
    name = settings.get("name", "an unnamed mechanism")
    steps, rate = card.get("steps"), card.get("sample_rate")
    if card.get("sampling") in ("poisson", "shuffled") and steps is not None:
        spent = f"{steps['spent']} step{'' if steps['spent'] == 1 else 's'}"
        drawn = (
            f"each {unit} was drawn by itself with probability {rate:.4g}"
            if card["sampling"] == "poisson" and rate is not None
            else f"each {unit} came once a pass, in a shuffled order"
        )
        bound = settings.get("max_grad_norm")
        clipped = f"clipped to a norm of {bound:g}" if isinstance(bound, (int, float)) else "clipped"
        if card["noise_multiplier"] == 0:
            return f"{name}: in {spent} {drawn}; nothing was hidden by noise."
        return (
            f"{name}: in {spent} {drawn}, its gradient {clipped}, and Gaussian noise added to the sum, "
            f"{card['noise_multiplier']:.4g} times as large (in standard deviation) as the most that one {unit} can change it."
            f"{_selection(settings)}"
        )
    if steps is not None:
        return (
            f"{name}: {_the(unit)} was perturbed by Gaussian noise before training, {steps['spent']} times of "
            f"{steps['planned']} planned."
        )
    if any(isinstance(read_claim(fields), Pure) for fields in claims(card)):
        return f"{name}: {_the(unit)} was replaced or perturbed at random before it left its owner."
    return f"{name}."


def settings_in_words(card: Mapping[str, Any]) -> str:
    """The mechanism's plain settings, one after the other; those that hold several values stand in a section of their own."""
    plain = {key: value for key, value in card["mechanism"].items() if key != "name" and _is_plain(value)}
    return "; ".join(f"{key.replace('_', ' ')} {_in_words(value)}" for key, value in plain.items())


def _selection(settings: Mapping[str, Any]) -> str:
    """What a method released besides steps, or read of public data, to choose parameters or their noise."""
    mask, steps = settings.get("mask"), settings.get("selection_steps")
    if isinstance(mask, Mapping) and mask.get("kind"):
        noise = mask.get("noise_multiplier")
        cost = f" (noise multiplier {noise:.4g}, part of the event)" if isinstance(noise, (int, float)) else ""
        return f" A {mask['kind']} relevance map{cost} sets how noise is divided among parameters."
    noise = settings.get("selection_noise_multiplier")
    if isinstance(steps, int) and isinstance(noise, (int, float)) and settings.get("choose_by") == "magnitudes":
        return (
            f" Trained parameters were chosen by {steps} releases of gradient magnitudes (noise multiplier {noise:.4g}, part of "
            "the event)."
        )
    return ""


def meaning(card: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """What the bound means: a paragraph, and (false-positive rate, highest true-positive rate) as percentages, rounded up.

    Empty where the card promises nothing or states no such figures.
    """
    if card["guarantee"] == "none" or not card.get("membership"):
        return "", []
    unit, adjacency = without_article(card["unit"]), card["adjacency"]
    asked = f"which of two versions of one {unit} was" if adjacency == "replace_one" else f"whether one {unit} was"
    rows = [
        (f"{float(rate):.1%}", f"{min(1.0, math.ceil(most * 1e4) / 1e4):.2%}")
        for rate, most in card["membership"].items()
    ]
    return (
        f"What that means: an attacker sees all that was released, knows everything else in the data, and has unlimited "
        f"computing power. They test {asked} among them. Whatever the test, its rates are bounded:",
        rows,
    )


#: Header of the table of rates.
RATES = ("False-positive rate", "True-positive rate, at most")


def meaning_lines(card: Mapping[str, Any]) -> list[str]:
    """`meaning` in Markdown: a paragraph and a table, or nothing."""
    paragraph, rates = meaning(card)
    return [paragraph, "", *table(RATES, rates)] if rates else []


def remark_lines(card: Mapping[str, Any], mark: str) -> list[str]:
    """`remarks` in Markdown: a heading, which begins with ``mark``, and a list each."""
    return [line for title, entries in remarks(card) for line in (f"{mark} {title}", "", *_list(entries), "")]


def _list(entries: list[str]) -> list[str]:
    return [f"- {entry}" for entry in entries]


def facts(card: Mapping[str, Any]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(name, value) of what a card states beside its bound, and (title, JSON) of what is too long for a line."""
    rows: list[tuple[str, Any]] = [("Settings", settings_in_words(card) or None)]
    sections = [
        (f"Mechanism: {_title(key).lower()}", json.dumps(value, indent=2))
        for key, value in card["mechanism"].items()
        if not _is_plain(value)
    ]
    if card["kind"] == Gaussian.kind:
        rows += _epsilon_rows(card)
    shown = {*ENVELOPE, *(key for fields in claims(card) for key in read_claim(fields).to_json())}
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
    sections += [
        (f"Event, {fields['unit']}", json.dumps(fields["event"], indent=2))
        for fields in claims(card)
        if "event" in fields
    ]
    return [(name, str(value)) for name, value in rows if value is not None], sections


def remarks(card: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """What a reader must know, under its headings."""
    return ((heading, card[key]) for heading, key in _LISTS if card[key])


def table(header: tuple[str, str], rows: list[tuple[str, str]]) -> list[str]:
    """A table of two columns in Markdown, and an empty line after it."""
    top = "| | |" if header == ("", "") else f"| {header[0]} | {header[1]} |"
    return [top, "|---|---|", *(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows), ""]


def markdown(card: Mapping[str, Any]) -> str:
    """The page that stands beside the JSON."""
    _, sections = facts(card)
    card = escape_all(dict(card), escape_markdown)
    lines = ["# Privacy card", ""]
    if card["guarantee"] == "none":
        lines += ["**Guarantee: none.**", "", *_list(card["why_no_guarantee"]), ""]
    else:
        found = [read_claim(fields).headline(fields) for fields in claims(card)]
        lines += [line for bound, words in found for line in (f"**{bound}**{words}", "")]
    lines += [f"How: {mechanism_sentence(card)}", "", *meaning_lines(card)]
    rows, _ = facts(card)
    lines += [*table(("", ""), rows), *remark_lines(card, "##")]
    lines += [f"`fastdp verify` works its figures out again from the JSON card beside this page. {STATED}", ""]
    for title, text in sections:
        lines += [f"## {escape_markdown(title)}", "", "```json", text, "```", ""]
    return "\n".join(lines)


def _epsilon_rows(card: Mapping[str, Any]) -> list[tuple[str, Any]]:
    bound = card["epsilon"]
    grid = "closed form" if bound["grid"] is None else f"grid {bound['grid']:g}"
    by = "Renyi bound" if bound["accountant"] == "rdp" else f"PLD, {grid}"
    title = "Epsilon of the event (no guarantee)" if card["guarantee"] == "none" else "Exact upper bound of epsilon"
    return [
        ("Unit", card["unit"]),
        ("Adjacency", card["adjacency"]),
        (title, f"{bound['upper_bound']} ({by})"),
        ("Delta", bound["delta"]),
        ("Target epsilon", rounded_up(bound["target"])),
    ]


def _the(unit: str) -> str:
    return unit if unit.split()[0] in ("each", "one", "every") else f"each {unit}"


def _title(key: str) -> str:
    return key.replace("_", " ").capitalize()


def _is_plain(value: Any) -> bool:
    return not isinstance(value, (dict, list)) or not value


def _in_words(value: Any) -> str:
    if value is None or value in ([], {}):
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


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
