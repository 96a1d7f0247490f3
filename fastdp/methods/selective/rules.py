"""A detector of private text that depends on nothing: patterns, checksums and a list of names."""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fastdp.methods.selective.names import AMBIGUOUS, GIVEN_NAMES, SURNAMES
from fastdp.methods.selective.spans import Span

ENTITIES = (
    *("PERSON", "EMAIL_ADDRESS", "PHONE_NUMBER", "CREDIT_CARD", "IBAN_CODE", "IP_ADDRESS", "DATE_TIME"),
    *("STREET_ADDRESS", "US_SSN", "DOMAIN_NAME"),
)

# Each expression starts only where a run of its characters starts, so that no text takes quadratic time. Scores were set by
# hand: they rank how seldom a match is something else, and a policy's threshold cuts them off.
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+")
_DOMAIN = re.compile(r"\b(?:https?://|www\.)[^\s<>\"']{3,200}", re.IGNORECASE)
_CARD = re.compile(r"(?<![\w.-])\d(?:[ -]?\d){11,18}(?![\w-])")
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?:[A-Z0-9]{11,30}|(?: [A-Z0-9]{4}){2,7}(?: [A-Z0-9]{1,3})?)\b")
_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]\w)")
_IPV6 = re.compile(r"(?<![\w:])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])")
_PHONE = re.compile(
    r"(?<![\w.,/:+-])(?:\+|00)?(?:\(\d{1,4}\)|\d{1,14})(?:[ .\-/x]{0,2}(?:\(\d{1,4}\)|\d{2,8})){0,6}(?![\w])"
)
_SSN = re.compile(r"(?<![\w-])\d{3}-\d{2}-\d{4}(?![\w-])")

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?|"
    r"Nov(?:ember)?|Dec(?:ember)?)"
)
_CLOCK = r"(?:[ T]\d{1,2}:\d{2}(?::\d{2})?)?"
_DATES = (
    (re.compile(rf"(?<![\w/-])\d{{4}}[/-]\d{{1,2}}[/-]\d{{1,2}}(?!\d){_CLOCK}"), 0.9),
    (re.compile(rf"(?<![\w/.-])\d{{1,2}}([/.-])\d{{1,2}}\1(?:\d{{4}}|\d{{2}})(?![\w/-]){_CLOCK}"), 0.9),
    (re.compile(rf"\b\d{{1,2}}(?:st|nd|rd|th)? (?:of )?{_MONTH}\b\.?(?:,? \d{{4}})?"), 0.9),
    (re.compile(rf"\b{_MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?\b(?:,? \d{{4}})?"), 0.9),
    (re.compile(rf"\b{_MONTH},? \d{{4}}\b"), 0.8),
    (re.compile(r"\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b", re.IGNORECASE), 0.6),
    (re.compile(r"(?<![\w./-])(?:1[89]|20)\d{2}(?:'?s)?(?![\w/-])"), 0.5),
)

_CAPITAL = r"[A-ZÀ-ÖØ-ÞĀČĎĐĒĚĞĪĽŁŃŇŐŒŘŚŞŠŢŤŪŮŰŽ]"
_CAPITALISED = rf"{_CAPITAL}[\w'’-]*"
_SUFFIX = (
    r"(?:Street|St|Avenue|Ave|Road|Rd|Lane|Ln|Drive|Dr|Boulevard|Blvd|Court|Ct|Circle|Cir|Place|Pl|Square|Sq|Terrace|Ter|"
    r"Way|Trail|Parkway|Pkwy|Highway|Hwy|Route|Crescent|Close|Alley|Plaza|Walk|Row|Hill|Manor|Pass|Ridge)"
)
_UNIT = r"(?:,?\s+(?:Apt|Apartment|Suite|Ste|Unit|Flat|Floor|Room|No|#)\.?\s*#?\w{1,6})*"
_PLACE = rf"(?:[,\n]\s*(?:{_CAPITALISED}|\d{{4,6}}(?:-\d{{3,4}})?)(?: (?:{_CAPITALISED}|\d{{4,6}}(?:-\d{{3,4}})?)){{0,3}}){{0,3}}"
_ADDRESSES = (
    # A house number before a street name, as in English.
    (re.compile(rf"(?<![\w.-])\d{{1,6}}[A-Za-z]? (?:{_CAPITALISED}\.? ){{1,4}}{_SUFFIX}\b\.?{_UNIT}{_PLACE}"), 0.9),
    (re.compile(rf"(?<![\w.-])\d{{1,6}} (?:{_CAPITALISED} ){{1,3}}\d{{1,5}}\b{_UNIT}{_PLACE}"), 0.7),
    (
        re.compile(
            rf"(?<![\w.-])\d{{1,6}} (?:{_CAPITALISED}\.? ?){{1,4}},?\s+(?:Apt|Suite|Unit)\.? \w{{1,6}}{_UNIT}{_PLACE}"
        ),
        0.8,
    ),
    # A street name before its number, as in much of Europe.
    (
        re.compile(
            rf"\b{_CAPITAL}\w*(?:stra(?:ss|ß)e|str\.|straat|gatan|gata|vej|weg|gasse|gade|gata|katu|tie|laan|plein|allee|platz|"
            rf"vägen|veien|utca|ulica|brautargata)\b(?: \d{{1,5}}[A-Za-z]?)?{_UNIT}{_PLACE}"
        ),
        0.8,
    ),
    (
        re.compile(
            rf"\b(?:Rue|Via|Viale|Calle|Avenida|Rua|Ulica|Ul\.|Strada|Chemin|Piazza|Plaza|Praça|Route de|Place)"
            rf"(?: (?:de|du|des|della|di|la|le|les|los|do|da|{_CAPITALISED})){{1,5}}(?:,? \d{{1,5}})?{_UNIT}{_PLACE}"
        ),
        0.7,
    ),
    (re.compile(rf"\b(?:P\.? ?O\.? ?Box|PSC|Box) \d{{1,6}}\b{_PLACE}"), 0.9),
    (
        re.compile(
            r"\b(?:zip code|zip|postal code|postcode)\b[:\s]{0,3}(?:is )?[A-Z0-9]{2,5}[- ]?[A-Z0-9]{0,4}\b",
            re.IGNORECASE,
        ),
        0.6,
    ),
)

_TITLED = re.compile(
    rf"\b(?:Mr|Mrs|Ms|Miss|Dr|Prof|Sir|Madam|Lady|Lord)\b\.? ?({_CAPITALISED}(?: {_CAPITALISED}){{0,2}})"
)
_INTRODUCED = re.compile(
    r"(?i:\b(?:my name is|name is|name:|patient:|customer:|i am called|i'm|i am|call me|regards,|sincerely,|yours,|this is|"
    r"name of))\s+"
    rf"({_CAPITALISED}(?: (?:{_CAPITAL}\.|{_CAPITALISED})){{0,3}})"
)
_WORDS = re.compile(rf"{_CAPITAL}\.|\w[\w'’-]*")
_PARTS = re.compile(r"[^\W_]+")
_LISTED = GIVEN_NAMES | SURNAMES
_INITIAL = re.compile(rf"{_CAPITAL}\.?")
_SENTENCE = re.compile(r"(?:^|[.!?:]\s|\n)\s*$")


@dataclass(frozen=True)
class RuleDetector:
    """Patterns for ten kinds of private text, most of them English and Western: a floor, not a ceiling.

    E-mail and web addresses, phone numbers, payment cards (Luhn's checksum), IBANs (ISO 13616's), IP addresses, dates,
    street addresses and US social security numbers by pattern; persons by a list of names, by titles and by phrases such
    as "my name is". It has no notion of context: measure its miss rate on your own text (`measure_detector`).

    Args:
        names: further names to look for, such as those of an organisation's own customers, of one or several words; matched
            as whole words or parts of a compound ("Anna" in "Anna-Maria", all of which is then private), whatever their
            case. They are private data: the card states how many there are, not which.
        entities: the kinds to look for.
    """

    names: frozenset[str] = field(default=frozenset(), repr=False)
    entities: tuple[str, ...] = ENTITIES

    def __post_init__(self) -> None:
        # Not folded before they are split: the small "İ" is two characters, of which one belongs to no word.
        object.__setattr__(self, "names", frozenset(unicodedata.normalize("NFC", name) for name in self.names))
        unknown = [entity for entity in self.entities if entity not in ENTITIES]
        if unknown:
            raise ValueError(f"the rule detector knows no entity {unknown[0]!r}; it knows {', '.join(ENTITIES)}")
        if not all(map(_parts, self.names)):
            raise ValueError("names holds one without a letter or digit, which no text can be searched for: remove it")

    def detect(self, texts: Sequence[str]) -> list[list[Span]]:
        """The spans of each text; those of different kinds may overlap."""
        return [self._spans(text) for text in texts]

    def describe(self) -> dict[str, Any]:
        return {"name": "rules", "entities": list(self.entities), "own_names": len(self.names)}

    def private_settings(self) -> dict[str, Any]:
        """The names themselves, which no card shows."""
        return {"names": sorted({" ".join(_parts(name)) for name in self.names})}

    def _spans(self, text: str) -> list[Span]:
        if unicodedata.is_normalized("NFC", text):
            return self._spans_of(text)
        composed, places = _composed(text)
        return [Span(s.entity, places[s.start][0], places[s.end - 1][1], s.score) for s in self._spans_of(composed)]

    def _spans_of(self, composed: str) -> list[Span]:
        found = [
            Span(entity, *own) for entity in self.entities if entity != "PERSON" for own in _FINDERS[entity](composed)
        ]
        return found + (list(self._persons(composed)) if "PERSON" in self.entities else [])

    def _persons(self, text: str) -> Iterator[Span]:
        for pattern, score in ((_TITLED, 0.8), (_INTRODUCED, 0.7)):
            for match in pattern.finditer(text):
                yield Span("PERSON", match.start(1), match.end(1), score)
        words = list(_WORDS.finditer(text))
        yield from self._customer_names(text, words)
        for index, word in enumerate(words):
            listed = _listed_names(word.group())
            if not listed:
                continue
            last = _last_of_name(text, words, index)
            alone = last == index
            doubtful = listed <= AMBIGUOUS and (alone or bool(_SENTENCE.search(text[: word.start()])))
            if not (doubtful and alone):
                yield Span("PERSON", word.start(), words[last].end(), 0.6 if doubtful else 0.9)

    @cached_property
    def _names_by_first_part(self) -> dict[str, tuple[set[tuple[str, ...]], list[int]]]:
        """By first part: the names that begin with it, and how many parts they have."""
        found: dict[str, set[tuple[str, ...]]] = {}
        for name in self.names:
            parts = _parts(name)
            found.setdefault(parts[0], set()).add(parts)
        return {first: (names, sorted(set(map(len, names)))) for first, names in found.items()}

    def _customer_names(self, text: str, words: Sequence[re.Match[str]]) -> Iterator[Span]:
        """The names that were given, each widened to the words it touches: the rest of a compound name is as private."""
        if not self.names:
            return
        places = list(_PARTS.finditer(text))
        folded = [place.group().casefold() for place in places]
        starts = [word.start() for word in words]
        for index, first in enumerate(folded):
            names, lengths = self._names_by_first_part.get(first, (set(), []))
            for length in lengths:
                if tuple(folded[index : index + length]) in names:
                    start, end = places[index].start(), places[index + length - 1].end()
                    since, to = bisect_right(starts, start) - 1, bisect_right(starts, end - 1) - 1
                    yield Span("PERSON", words[since].start(), words[to].end(), 1.0)


def _composed(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text with each letter and its accents in one character where there is one, and where each came from, start to end."""
    starts: list[int] = []
    for index, letter in enumerate(text):
        if unicodedata.combining(letter) and starts:
            continue
        # Besides accents, the parts of a Korean syllable compose, and these are letters by themselves.
        if not starts or letter < "\u0300" or not _composes(text[starts[-1] : index], letter):
            starts.append(index)
    composed, places = [], []
    for start, end in zip(starts, [*starts[1:], len(text)]):
        composed.append(unicodedata.normalize("NFC", text[start:end]))
        places += [(start, end)] * len(composed[-1])
    return "".join(composed), places


def _composes(piece: str, letter: str) -> bool:
    """Whether a letter joins the one before it in one character."""

    def nfc(text: str) -> str:
        return unicodedata.normalize("NFC", text)

    return nfc(piece + letter) != nfc(piece) + nfc(letter)


def _parts(name: str) -> tuple[str, ...]:
    """A name's runs of letters and digits, folded: what its parts may be joined by does not matter."""
    return tuple(part.casefold() for part in _PARTS.findall(name))


def _listed_names(word: str) -> frozenset[str]:
    """Capitalised parts of a word without its possessive ending that are in the lists."""
    bare = re.sub(r"['’]s$", "", word)
    return frozenset(part.casefold() for part in bare.split("-") if part[:1].isupper()) & _LISTED


def _last_of_name(text: str, words: Sequence[re.Match[str]], index: int) -> int:
    """Index of the last word of a name that begins at ``index``: up to three capitalised words or initials follow."""
    last = index
    for following in range(index + 1, min(index + 4, len(words))):
        gap = text[words[last].end() : words[following].start()]
        word = words[following].group()
        if gap.strip(" ") or "\n" in gap or not (word[0].isupper() or _INITIAL.fullmatch(word)):
            break
        last = following
    return last


def luhn_valid(digits: str) -> bool:
    """Luhn's checksum (ISO/IEC 7812-1, annex B) of a string of digits."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (2 if place % 2 else 1)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def iban_valid(iban: str) -> bool:
    """The checksum of an IBAN without spaces (ISO 13616: its rearranged digits are 1 modulo 97)."""
    turned = iban[4:] + iban[:4]
    return int("".join(str(int(letter, 36)) for letter in turned)) % 97 == 1


_Found = Iterable[tuple[int, int, float]]


def _by_pattern(*patterns: tuple[re.Pattern[str], float]) -> Callable[[str], _Found]:
    return lambda text: ((*match.span(), score) for pattern, score in patterns for match in pattern.finditer(text))


def _cards(text: str) -> _Found:
    for match in _CARD.finditer(text):
        if luhn_valid(re.sub(r"\D", "", match.group())):
            yield (*match.span(), 1.0)


def _ibans(text: str) -> _Found:
    for match in _IBAN.finditer(text):
        # Capitals after a spaced IBAN look like another group of it: drop groups until the checksum holds.
        groups = match.group().split(" ")
        while groups:
            joined = " ".join(groups)
            if len(joined) >= 15 and iban_valid(joined.replace(" ", "")):
                yield match.start(), match.start() + len(joined), 1.0
                break
            groups.pop()


def _addresses_of_machines(text: str) -> _Found:
    for pattern in (_IPV4, _IPV6):
        for match in pattern.finditer(text):
            try:
                ipaddress.ip_address(match.group())
            except ValueError:
                continue
            yield (*match.span(), 0.95)


def _phones(text: str) -> _Found:
    for match in _PHONE.finditer(text):
        number = match.group()
        digits = sum(letter.isdigit() for letter in number)
        if not 7 <= digits <= 15 or any(pattern.fullmatch(number) for pattern, _ in _DATES) or _SSN.fullmatch(number):
            continue
        yield (*match.span(), 0.8 if number[0] in "+(" or any(mark in number for mark in " -.") else 0.5)


_FINDERS: dict[str, Callable[[str], _Found]] = {
    "EMAIL_ADDRESS": _by_pattern((_EMAIL, 1.0)),
    "DOMAIN_NAME": _by_pattern((_DOMAIN, 0.9)),
    "CREDIT_CARD": _cards,
    "IBAN_CODE": _ibans,
    "IP_ADDRESS": _addresses_of_machines,
    "PHONE_NUMBER": _phones,
    "US_SSN": _by_pattern((_SSN, 0.8)),
    "DATE_TIME": _by_pattern(*_DATES),
    "STREET_ADDRESS": _by_pattern(*_ADDRESSES),
}
