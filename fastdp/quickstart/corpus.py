"""The quickstart's two texts, both generated: public prose to pretrain on, private records with invented names.

Neither contains a real person, place or medicine. Names are put together from syllables, so that a run can show what a
model keeps of them without a real name ever being in a data set. Both are functions of a seed alone.
"""

from __future__ import annotations

import random
import re
from importlib import resources

Grammar = dict[str, list[str]]


def read_grammar() -> Grammar:
    """Symbol -> alternatives, from `grammar.txt` beside this file, which explains its own form."""
    grammar: Grammar = {}
    symbol = ""
    for line in resources.files(__package__).joinpath("grammar.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            grammar[symbol].append(line.strip())
        elif line and not line.startswith("#"):
            symbol, _, alternatives = line.partition(":")
            grammar[symbol] = alternatives.strip().split("|") if alternatives else []
    return grammar


def expand(grammar: Grammar, symbol: str, rng: random.Random) -> str:
    """A random text derived from `symbol`."""

    def replacement(match: re.Match[str]) -> str:
        inner = match.group(1)
        low, dots, high = inner.partition("..")
        if dots:
            return str(rng.randint(int(low), int(high)))
        text = expand(grammar, inner.lower(), rng)
        return text[0].upper() + text[1:] if inner[0].isupper() else text

    return re.sub(r"\{([^}]+)\}", replacement, rng.choice(grammar[symbol]))


def public_text(paragraphs: int, seed: int) -> list[str]:
    """Paragraphs of three to seven generated sentences, the stand-in for a public pretraining corpus."""
    grammar, rng = read_grammar(), random.Random(f"public {seed}")
    return [" ".join(expand(grammar, "public", rng) for _ in range(rng.randint(3, 7))) for _ in range(paragraphs)]


def private_records(count: int, seed: int) -> list[str]:
    """Visit notes of an invented clinic: `count` of them, each of a person with a name of their own."""
    grammar, rng = read_grammar(), random.Random(f"private {seed}")
    records: dict[str, str] = {}
    while len(records) < count:
        record = expand(grammar, "record", rng)
        name = record.partition("Patient: ")[2].partition(",")[0]
        records.setdefault(name, record)
    return list(records.values())
