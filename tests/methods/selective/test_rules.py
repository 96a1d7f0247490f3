"""The rule detector: each kind of private text, its checksums, and what it must leave alone."""

import time
import unicodedata

import pytest
from hypothesis import example, given, strategies as st

from fastdp.methods.selective import PrivacyDetector, RuleDetector
from tests.cases import cases


def found(text, entity, **settings):
    (spans,) = RuleDetector(entities=(entity,), **settings).detect([text])
    return [text[span.start : span.end] for span in spans]


@cases(
    ("entity", "text", "expected"),
    [
        ("EMAIL_ADDRESS", "Write to jo.doe+x@mail.example.org, please", "jo.doe+x@mail.example.org"),
        ("CREDIT_CARD", "card 4111 1111 1111 1111.", "4111 1111 1111 1111"),
        ("CREDIT_CARD", "card 378282246310005", "378282246310005"),
        ("IBAN_CODE", "to GB82WEST12345698765432 today", "GB82WEST12345698765432"),
        ("IBAN_CODE", "to DE89 3704 0044 0532 0130 00 BANK", "DE89 3704 0044 0532 0130 00"),
        ("IP_ADDRESS", "from 192.168.10.254, at night", "192.168.10.254"),
        ("IP_ADDRESS", "from 2001:db8::8a2e:370:7334.", "2001:db8::8a2e:370:7334"),
        ("PHONE_NUMBER", "call +41 (0)85 806 98 67 now", "+41 (0)85 806 98 67"),
        ("PHONE_NUMBER", "call 0393 1144137", "0393 1144137"),
        ("US_SSN", "number 710-31-0236 of hers", "710-31-0236"),
        ("DATE_TIME", "on 1985-11-18 22:50:23 sharp", "1985-11-18 22:50:23"),
        ("DATE_TIME", "born 8/5/1989", "8/5/1989"),
        ("DATE_TIME", "the 3rd of March 2021", "3rd of March 2021"),
        ("DATE_TIME", "on Feb 7, 2020 again", "Feb 7, 2020"),
        ("STREET_ADDRESS", "at 615 Benedum Drive, Apt. 4 now", "615 Benedum Drive, Apt. 4"),
        ("STREET_ADDRESS", "in der Lindenstraße 12", "Lindenstraße 12"),
        ("DOMAIN_NAME", "see https://www.example.org/a?b=c for it", "https://www.example.org/a?b=c"),
        ("PERSON", "yesterday Richard McCray came", "Richard McCray"),
        ("PERSON", "I met Dr. Szöllösy there", "Szöllösy"),
        ("PERSON", "my name is Rubija", "Rubija"),
        ("PERSON", "then we saw Will Smith", "Will Smith"),
    ],
)
def test_found(entity, text, expected):
    assert expected in found(text, entity)


@cases(
    ("entity", "text"),
    [
        ("CREDIT_CARD", "order 4111 1111 1111 1112"),
        ("IBAN_CODE", "code GB82WEST12345698765433"),
        ("IP_ADDRESS", "version 999.1.2.3 and time 12:30"),
        ("PHONE_NUMBER", "only 12 345"),
        ("PHONE_NUMBER", "born 1985-11-18"),
        ("EMAIL_ADDRESS", "a@b and @home"),
        ("PERSON", "Will you come in May? The hill is green."),
        ("DATE_TIME", "it costs 2,500 or 12345"),
    ],
)
def test_left_alone(entity, text):
    assert not found(text, entity)


OWN = frozenset({"Quorra", "Zed O'Dunn"})


@cases(
    ("names", "text", "expected"),
    [
        (OWN, "they know QUORRA and zed", ["QUORRA"]),
        (OWN, "ask Quorra-Lin today", ["Quorra-Lin"]),
        (OWN, "ask lin-quorra today", ["lin-quorra"]),
        (OWN, "it is Quorra's turn", ["Quorra's"]),
        (OWN, "user quorra_77 wrote", ["quorra_77"]),
        (OWN, "they met zed o’dunn yesterday", ["zed o’dunn"]),
        (OWN, "they met Zed-O'Dunn", ["Zed-O'Dunn"]),
        (OWN, "quorral and dunn and zed's", []),
        # The surname that follows a known name stays private when that name is given too.
        (frozenset({"Anna"}), "then Anna Zukowska came", ["Anna", "Anna Zukowska"]),
    ],
)
def test_own_names_in_any_case_in_compounds_and_of_several_words(names, text, expected):
    assert found(text, "PERSON", names=names) == expected


def test_own_names_are_counted_and_shown_by_nothing():
    assert RuleDetector(names=OWN).describe()["own_names"] == 2
    assert "uorra" not in repr(RuleDetector(names=OWN))
    with pytest.raises(ValueError, match="without a letter or digit"):
        RuleDetector(names=frozenset({"Quorra", "--"}))


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("name_form", ["NFC", "NFD"])
def test_accents_in_characters_of_their_own(form, name_form):
    text = unicodedata.normalize(
        form, "Élodie wrote to zoë ångström, born on 3 May 1990, 민준, İbrahim and Ms. Ødegård."
    )
    names = frozenset(unicodedata.normalize(name_form, name) for name in ("Zoë Ångström", "민준", "İbrahim"))
    spans = RuleDetector(names=names).detect([text])[0]
    composed = {unicodedata.normalize("NFC", text[span.start : span.end]) for span in spans}
    assert {"zoë ångström", "3 May 1990", "민준", "İbrahim", "Ødegård"} <= composed


@given(st.text(alphabet="aeéèñ\u0301\u0327 Zü.1\u1100\u1161\u11a8", max_size=30))
@example("é\u0301\u1100\u1161")  # an accent too many: one letter, two characters
def test_spans_of_any_form_lie_in_the_text(text):
    for span in RuleDetector(names=frozenset({"é", "Zü"})).detect([text])[0]:
        assert 0 <= span.start < span.end <= len(text)


@pytest.mark.parametrize("text", ["then Anna-Maria came", "the Anna-Zukowska case"])
def test_known_names_with_a_hyphen(text):
    assert any(name.startswith("Anna-") for name in found(text, "PERSON"))


def test_is_a_detector_and_refuses_unknown_entities():
    assert isinstance(RuleDetector(), PrivacyDetector)
    with pytest.raises(ValueError, match="no entity 'MOOD'"):
        RuleDetector(entities=("MOOD",))


@cases(
    "text",
    [
        *("a" * 50_000, "1" * 50_000, "1 " * 25_000, "Aa " * 15_000, ":" * 50_000, "a." * 25_000 + "@"),
        *("e" + "\u0301" * 500_000, "e\u0301" * 25_000, "\u1100\u1161" * 25_000),
    ],
)
def test_hostile_text_takes_linear_time(text):
    begin = time.process_time()
    RuleDetector().detect([text])
    assert time.process_time() - begin < 4
