"""A card in the forms that others ask for: a model page, a registry's entry, an evaluation's outline, a page for a browser.

Each form carries the card itself, so that `verify` reads any of them. It is compared with what would be written anew from that
card, so that no sentence of it can differ from the card's figures. What people add outside the part that comes from the card,
such as a curator's name, is not compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import yaml

from fastdp.accounting import page
from fastdp.accounting.claim import Gaussian, two_decimals, without_article
from fastdp.accounting.serialisation import canonical
from fastdp.untrusted import (
    PAGE_POLICY,
    escape_all,
    escape_controls,
    escape_html,
    escape_markdown,
    parse_json_object,
    parse_yaml,
)

Format = Literal["huggingface", "registry", "nist", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)
#: Raised whenever the words of a form change: older pages are then not compared word by word, and `verify` says so.
EXPORT_VERSION = 6
SUFFIXES: dict[Format, str] = {"huggingface": ".md", "registry": ".yaml", "nist": ".md", "html": ".html"}

_BEGIN = re.compile(r"fastdp-card (\w+) (\d+) begin")
_END = "fastdp-card end"
_FILL_IN = "TO FILL IN"


def export(card: Mapping[str, Any], form: Format) -> str:
    """A card as one of `FORMATS`.

    Args:
        card: a `Card` or its dict.
        form: ``huggingface``, the README of a model's folder, with metadata; ``registry``, an entry of the Differential Privacy
            Deployments Registry (Nanayakkara, Ghazi and Vadhan 2025, arXiv:2509.13509) with what only people know left to
            fill in; ``nist``, under the headings of NIST SP 800-226 (2025); ``html``, a page on its own.

    Returns:
        The text. `read_export`, and so `verify`, takes it back.

    Raises ValueError for another form, and for a card that states too little to be written.

    >>> from fastdp.accounting import Card, Gaussian, dpsgd
    >>> claim = Gaussian("example", "add_remove", dpsgd(2.0, 0.1, 10), 1e-5)
    >>> card = Card.of(claim, mechanism="DP-SGD", noise_source={})
    >>> "## Unit of privacy" in export(card, "nist")
    True
    """
    if form not in FORMATS:
        raise ValueError(f"{form!r} is no form of a card: choose {', '.join(FORMATS)}")
    try:
        return _WRITERS[form](card)
    except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise ValueError(f"the card is malformed: it cannot be written as {form} ({error!r})") from None


def read_export(text: str) -> tuple[dict[str, Any], list[str]] | None:
    """The card in a text of `export`, and what could not be compared, in words; None for a text that is no such form.

    Raises ValueError for a text that does not say what its card says, or holds no card that can be read.
    """
    found = _BEGIN.search(text)
    if found is None:
        return None
    form, version = found.group(1), int(found.group(2))
    if len(_BEGIN.findall(text)) > 1 or text.count(_END) != 1:
        raise ValueError("it holds more than one card, or part of one")
    card = parse_json_object(_card_text(text, form))
    if form not in FORMATS or version != EXPORT_VERSION:
        return card, [
            f"whether the page says what its card says: its form is {form} {version}, which is not known here"
        ]
    if _compared(text, form) != _compared(export(card, form), form):  # type: ignore[arg-type]
        raise ValueError("the page says otherwise than the card that it carries: export the card anew")
    if form in _SHARED:
        return card, ["what people wrote on this page around the part that comes from the card"]
    return card, []


#: Forms that people add to. In the others every letter comes from the card.
_SHARED = ("huggingface", "registry")


def _card_text(text: str, form: str) -> str:
    """The JSON text of the card in a form: a line of its own, or a field of a registry's entry."""
    if form == "registry":
        try:
            return _read_yaml(text)["deployment"]["implementation"]["additional_information"]
        except (KeyError, TypeError):
            raise ValueError("it is no entry of the registry") from None
    line = next((line.strip() for line in text.splitlines() if line.strip().startswith('{"')), None)
    if line is None:
        raise ValueError("it carries no card")
    return line


def _read_yaml(text: str) -> dict[str, Any]:
    if not isinstance(read := parse_yaml(text), dict):
        raise ValueError("it holds no settings")
    return read


def _compared(text: str, form: str) -> str:
    """The part of a form that comes from the card: all of it, or what stands between the two marks."""
    if form not in _SHARED:
        return text.strip()
    # Reading refuses duplicate keys: nothing that people add may contradict the part that comes from the card.
    _read_yaml(text if form == "registry" else text.partition("---")[2].partition("\n---")[0])
    start = _BEGIN.search(text)
    assert start is not None
    return "\n".join(line.rstrip() for line in text[start.start() : text.index(_END)].splitlines())


def _card_line(card: Mapping[str, Any]) -> str:
    """The card on one line, in characters that no form gives a meaning to."""
    return canonical(card).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _mark(form: str) -> str:
    return f"fastdp-card {form} {EXPORT_VERSION} begin"


def _model_name(card: Mapping[str, Any]) -> str | None:
    model = card.get("model")
    return str(model["name"]) if isinstance(model, Mapping) and model.get("name") else None


def _figures(card: Mapping[str, Any]) -> dict[str, Any]:
    """Epsilon and delta of the first claim, where it has both."""
    if card["kind"] != Gaussian.kind or card["guarantee"] == "none":
        return {}
    bound = card["epsilon"]
    return {"epsilon": float(two_decimals(bound["upper_bound"])), "delta": bound["delta"]}


def _huggingface(card: Mapping[str, Any]) -> str:
    promised = card["guarantee"] != "none"
    # Two words of ASCII and a slash are what the hub reads as a model's name.
    name = _model_name(card)
    metadata: dict[str, Any] = {
        **({"base_model": name} if name and re.fullmatch(r"[\w.-]+/[\w.-]+", name) else {}),
        "tags": ["fastdp", *(["differential-privacy"] if promised else [])],
        "privacy": {
            "guarantee": card["guarantee"],
            **_figures(card),
            **{key: card[key] for key in ("unit", "adjacency") if key in card},
        },
    }
    lines = ["---", f"# {_mark('huggingface')}", yaml.safe_dump(metadata, sort_keys=False).rstrip(), "---", ""]
    title = f"# {escape_markdown(name)} fine-tuned on private data" if name else "# A model of private data"
    shown = escape_all(dict(card), escape_markdown)
    lines += [title, "", "## Privacy", ""]
    lines += [f"**{line}**" if promised else line for line in page.headlines(shown)]
    lines += ["", page.mechanism_sentence(shown), "", *page.meaning_lines(shown), *page.remark_lines(shown, "###")]
    lines += [
        "`fastdp verify README.md` works these figures out again from the card below; `--weights .` looks at the weights too. "
        + page.STATED,
        "",
        "<details><summary>Card</summary>",
        "",
        "```json",
        _card_line(card),
        "```",
        "",
        "</details>",
        "",
        f"<!-- {_END} -->",
        "",
    ]
    return "\n".join(lines)


def _registry(card: Mapping[str, Any]) -> str:
    pure = card["kind"] == "pure"
    local = card["kind"] in ("pure", "metric") or any("local differential privacy" in note for note in card["notes"])
    variant = {"gaussian": "Approximate DP", "pure": "Pure DP", "metric": "Metric DP"}.get(card["kind"], "None")
    unit = card.get("unit", "not stated")
    parameters = _figures(card) or (
        {"epsilon": card["budget"]["of_a_unit"] * card["budget"]["releases"]} if pure else {}
    )
    stated = {
        "dp_variant": {
            "variant_name": variant if card["guarantee"] != "none" else "None",
            "unprotected_quantities": "; ".join(card["unprotected"]) or "none known",
        },
        "privacy_loss": {
            "privacy_unit": unit,
            "privacy_unit_details": _neighbours(card),
            "number_of_privacy_units": card.get("dataset_size", "not stated"),
            "privacy_parameters": parameters or "none",
            "privacy_parameters_details": "; ".join(page.headlines(card)),
        },
        "implementation": {
            "mechanisms": page.mechanism_sentence(card),
            "composition": _composition(card),
            "post_processing": "everything computed from the released weights is post-processing",
            "additional_information": _card_line(card),
        },
        "deployment_model": {
            "model_name": "Local" if local else "Central",
            "trust_assumptions": "; ".join(card["assumptions"]) or "none stated",
            "release_type": "One-shot release",
            "data_source_type": "Static",
            "access_type": "Non-interactive",
        },
    }
    people = {
        "basic": {
            "name": _FILL_IN,
            "data_curators": [{"data_curator_name": _FILL_IN, "data_curator_type": _FILL_IN}],
            "description": _FILL_IN,
            "intended_use": _FILL_IN,
            "data_product_type": "Machine learning model",
            "data_product_region": _FILL_IN,
            "data_product_sector": _FILL_IN,
            "publication_date": _FILL_IN,
        }
    }
    by_card = _indented(
        yaml.safe_dump(escape_all(stated, escape_controls), sort_keys=False, width=10**9, allow_unicode=True)
    )
    by_people = _indented(yaml.safe_dump(people, sort_keys=False))
    return (
        f"url_slug: {_FILL_IN}\ndeployment:\n{by_people}"
        f"  # {_mark('registry')}\n{by_card}  # {_END}\n"
        f"  administrative:\n    status: Draft\n    registry_authors: [{_FILL_IN}]\n    tier: 3\n"
    )


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())


def _neighbours(card: Mapping[str, Any]) -> str:
    unit = without_article(card.get("unit", "unit"))
    return {
        "add_remove": f"neighbouring data sets differ in one {unit}, which one of them has and the other has not",
        "replace_one": f"neighbouring data sets differ in one {unit}, which is another in each",
        "zero_out": f"neighbouring data sets differ in one {unit}, whose place is empty in one of them",
    }.get(card.get("adjacency", ""), f"one {unit} is another")


def _composition(card: Mapping[str, Any]) -> str:
    if card["kind"] == Gaussian.kind:
        return (
            "all releases are one event, whose cost is an upper bound by privacy loss distributions; "
            "`fastdp verify` computes it again from the card"
        )
    if "budget" in card:
        return "bounds of the units of a text, and of its releases, add up"
    return "as the cards that it names say"


def _outline(card: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Headings of NIST SP 800-226, and what the card says under each; lines that begin with a dash are entries of a list."""
    source = card["noise_source"]
    return [
        ("The guarantee", [f"- {line}" for line in page.headlines(card)]),
        (
            "Privacy parameters",
            [f"{name} {value:g}" for name, value in _figures(card).items()]
            or ["None is stated beyond the sentence above."],
        ),
        ("Variant", [f"{card['guarantee']} ({card['kind']})"]),
        ("Unit of privacy", [f"{card.get('unit', 'not stated')}: {_neighbours(card)}."]),
        (
            "Mixing with other releases",
            [f"- {entry}" for entry in card.get("earlier_releases", [])]
            or ["The card counts this run alone; other releases of the same data add to it."],
        ),
        ("Algorithm", [page.mechanism_sentence(card), page.settings_in_words(card)]),
        ("Composition", [_composition(card) + "."]),
        ("Utility, accuracy and bias", ["A card states none: see the model's own evaluation, group by group."]),
        ("Threat model", [f"- {entry}" for entry in card["assumptions"]] or ["No assumption is stated."]),
        (
            "Implementation of the mechanism",
            [
                ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in source.items()) or "not stated",
                *(f"- {entry}" for entry in card["remaining"]),
            ],
        ),
        (
            "Data security, access control and collection",
            [f"- {entry}" for entry in card["unprotected"]] or ["Nothing is stated."],
        ),
        ("Notes", [f"- {entry}" for entry in card["notes"]] or ["None."]),
    ]


def _nist(card: Mapping[str, Any]) -> str:
    lines = [f"<!-- {_mark('nist')} -->", "# Evaluation of a differential privacy guarantee (NIST SP 800-226)", ""]
    shown = escape_all(dict(card), escape_markdown)
    for heading, entries in _outline(shown):
        lines += [f"## {heading}", "", *(entry for entry in entries if entry), ""]
        if heading == "The guarantee":
            lines += page.meaning_lines(shown)
    lines += ["## Card", "", "```json", _card_line(card), "```", "", f"<!-- {_END} -->", ""]
    return "\n".join(lines)


def _html(card: Mapping[str, Any]) -> str:
    parts = [f"<h1>{escape_html(_title(card))}</h1>"]
    parts += [f'<p class="bound">{escape_html(line)}</p>' for line in page.headlines(card)]
    parts.append(f"<p>{escape_html(page.mechanism_sentence(card))}</p>")
    paragraph, rates = page.meaning(card)
    if rates:
        said = paragraph.removeprefix("What that means: ")
        parts.append(f"<h2>What that means</h2><p>{escape_html(said[0].upper() + said[1:])}</p>")
        parts.append(_rows([page.RATES, *rates], head=True))
    for heading, entries in page.remarks(card):
        items = "".join(f"<li>{escape_html(str(entry))}</li>" for entry in entries)
        parts.append(f"<h2>{heading}</h2><ul>{items}</ul>")
    rows, sections = page.facts(card)
    parts.append("<h2>What it states</h2>" + _rows(rows))
    for title, text in sections:
        parts.append(f"<details><summary>{escape_html(title)}</summary><pre>{escape_html(text)}</pre></details>")
    parts.append(
        "<p><code>fastdp verify</code> works the figures out again from this page, which carries the card. "
        f"{escape_html(page.STATED)}</p>"
    )
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n'
        f"<!-- {_mark('html')} -->\n"
        f'<head><meta charset="utf-8">{PAGE_POLICY}<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape_html(_title(card))}</title>\n<style>{_STYLE}</style></head>\n<body><main>\n{body}\n</main>\n"
        f'<script type="application/json" id="fastdp-card">\n{_card_line(card)}\n</script>\n'
        f"</body>\n<!-- {_END} -->\n</html>\n"
    )


def _title(card: Mapping[str, Any]) -> str:
    name = _model_name(card)
    return f"Privacy card of {name}" if name else "Privacy card"


def _rows(rows: list[tuple[str, str]], head: bool = False) -> str:
    first = "th" if head else "td"
    cells = [
        f"<tr><{tag}>{escape_html(name)}</{tag}><{tag}>{escape_html(value)}</{tag}></tr>"
        for tag, (name, value) in zip([first, *["td"] * len(rows)], rows)
    ]
    return f'<div class="wide"><table>{"".join(cells)}</table></div>'


_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --quiet: #5a6675; --line: #d8dee6; --ground: #fff; --accent: #00796b }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf1; --quiet: #9aa7b5; --line: #36414d; --ground: #14191f; --accent: #4db6ac } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 0 }
main { max-width: 46rem; margin: 0 auto; padding: 1rem 1rem 3rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.bound { font-size: 1.25rem; font-weight: 600; border-left: 4px solid var(--accent); padding-left: .8rem }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-size: .92rem }
td, th { border-bottom: 1px solid var(--line); padding: .35rem .5rem; text-align: left; vertical-align: top }
td { overflow-wrap: anywhere } td:first-child { color: var(--quiet); overflow-wrap: normal }
pre { overflow-x: auto; font-size: .8rem } code { font-size: .9em }
""".strip()

_WRITERS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "huggingface": _huggingface,
    "registry": _registry,
    "nist": _nist,
    "html": _html,
}
