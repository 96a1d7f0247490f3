"""Spans, the policy, and their alignment with tokens."""

import pytest
from hypothesis import given, strategies as st

from fastdp.methods.selective import PrivacyPolicy, Span, token_mask
from fastdp.methods.selective.spans import merge
from tests.cases import cases
from tests.tokenizers_for_tests import quickstart

TEXT = "Ms. Anna Lindqvist-Åberg lives here"


NAME, DATE = Span("PERSON", 4, 8, 0.9), Span("DATE", 25, 30, 0.4)


@cases(
    ("settings", "spans", "private"),
    [
        # Overlapping spans become one.
        ({"whole_words": False}, [Span("PERSON", 4, 8), Span("NAME", 6, 18), Span("X", 30, 35)], [(4, 18), (30, 35)]),
        ({}, [Span("PERSON", 5, 10)], [(4, 18)]),
        ({"entities": frozenset({"DATE"})}, [NAME, DATE], [(25, 30)]),
        ({"threshold": 0.5}, [NAME, DATE], [(4, 8)]),
    ],
)
def test_what_is_private(settings, spans, private):
    assert PrivacyPolicy(**settings).private(TEXT, spans) == private
    assert PrivacyPolicy().private("a - b", [Span("X", 2, 3)]) == [(2, 3)]


@cases("span", [Span("X", 30, 99), Span("X", -1, 4), Span("X", 5, 5), Span("X", 9, 4), Span("X", 0, 3, 1.5)])
def test_impossible_spans_are_refused(span):
    with pytest.raises(ValueError, match="a X span"):
        PrivacyPolicy().private(TEXT, [span])


def test_impossible_policies_are_refused():
    with pytest.raises(ValueError, match="entities is empty"):
        PrivacyPolicy(entities=frozenset())
    with pytest.raises(ValueError, match="threshold is 2"):
        PrivacyPolicy(threshold=2)


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)


@given(intervals)
def test_merge_keeps_the_union(stretches):
    merged = merge(stretches)
    assert {c for s, e in merged for c in range(s, e)} == {c for s, e in stretches for c in range(s, e)}
    assert all(first[1] < second[0] for first, second in zip(merged, merged[1:]))


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30), st.data())
def test_every_private_character_is_covered(text, data):
    """No token left in the clear holds a character, or a byte of one, of a private stretch."""
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    tokenizer, _ = quickstart()
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = token_mask(encoded["offset_mapping"], [(start, end)])
    clear = {c for (since, to), hidden in zip(encoded["offset_mapping"], mask) if not hidden for c in range(since, to)}
    assert clear.isdisjoint(range(start, end))
    assert any(mask)


def test_a_token_of_no_characters_inside_a_stretch_is_private():
    assert token_mask([(0, 4), (2, 2), (4, 4)], [(0, 4)]) == [True, True, False]
