"""Precision, recall and miss rate against counts made by hand."""

import json

import pytest

from fastdp.methods.selective import PrivacyPolicy, RuleDetector, Span, measure_detector, read_labelled_spans

from .test_perturbation import Fixed


def test_counts():
    texts = ["Anna met Bo on Monday", "nothing here"]
    labels = [[Span("PERSON", 0, 4), Span("PERSON", 9, 11), Span("DATE", 15, 21)], []]
    reported = [[Span("NAME", 0, 4), Span("DATE", 15, 18)], [Span("NAME", 0, 7)]]
    measured = measure_detector(Fixed(reported), texts, labels, PrivacyPolicy(whole_words=False))
    rows = measured.by_entity
    assert rows["PERSON"]["recall"] == 0.5
    assert rows["DATE"]["recall"] == 0.0
    assert rows["DATE"]["touched"] == 1
    assert rows["NAME"]["precision"] == 0.5
    assert rows["NAME"]["recall"] is None
    assert measured.span_miss_rate == pytest.approx(2 / 3)
    assert measured.character_miss_rate == pytest.approx(5 / 12)


def test_whole_words_cover_more_and_the_policy_limits_what_counts():
    texts, labels = ["Anna met Bo on Monday"], [[Span("PERSON", 0, 4), Span("DATE", 15, 21)]]
    assert measure_detector(Fixed([[Span("X", 0, 3), Span("DATE", 15, 18)]]), texts, labels).span_miss_rate == 0
    only = PrivacyPolicy(entities=frozenset({"PERSON"}))
    assert list(measure_detector(RuleDetector(), texts, labels, only).by_entity) == ["PERSON"]


def test_refused():
    with pytest.raises(ValueError, match="1 lists of labels were given for 2 texts"):
        measure_detector(RuleDetector(), ["a", "b"], [[]])
    with pytest.raises(ValueError, match="no text carries a label"):
        measure_detector(RuleDetector(), ["a"], [[]])
    with pytest.raises(ValueError, match="of a text of 1"):
        measure_detector(RuleDetector(), ["a"], [[Span("X", 0, 9)]])


def test_labelled_file(tmp_path):
    path = tmp_path / "spans.json"
    entry = {"full_text": "Anna", "spans": [{"entity_type": "PERSON", "start_position": 0, "end_position": 4}]}
    path.write_text(json.dumps([entry]))
    assert read_labelled_spans(path) == (["Anna"], [[Span("PERSON", 0, 4)]])
    for content, message in (
        ("{", "not JSON"),
        ("[" * 10**5, "nested too deep"),
        ("{}", "list of labelled"),
        ('[{"full_text": 1}]', "entry 0"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_labelled_spans(path)
