"""The adapters: a Hugging Face token classifier, and Presidio without the network."""

import socket

import pytest
import torch
from transformers import BertConfig, BertForTokenClassification

from fastdp.methods.selective import PresidioDetector, PrivacyDetector, TokenClassificationDetector
from fastdp.methods.selective.token_classification import label_spans
from tests.tokenizers_for_tests import word_tokenizer

WORDS = ["anna", "bo", "met", "in", "paris", "today"]


def classifier(window=64):
    """A model whose label is its word's own: embeddings go straight to the head."""
    labels = {0: "O", 1: "B-PERSON", 2: "I-PERSON", 3: "B-PLACE"}
    config = BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=0, num_attention_heads=1, intermediate_size=8,
        max_position_embeddings=window, num_labels=4, id2label=labels,
    )  # fmt: skip
    model = BertForTokenClassification(config)
    with torch.no_grad():
        for table in (model.bert.embeddings.position_embeddings, model.bert.embeddings.token_type_embeddings):
            table.weight.zero_()
        model.bert.embeddings.word_embeddings.weight.copy_(torch.eye(8))
        model.classifier.weight.zero_()
        for word, label in ((1, 1), (2, 2), (5, 3), (0, 0), (3, 0), (4, 0), (6, 0)):
            model.classifier.weight[label, word] = 3.0
        model.classifier.bias.zero_()
    return model


def detector(window=64, **settings):
    tokenizer = word_tokenizer(WORDS)
    tokenizer.pad_token = "[UNK]"
    return TokenClassificationDetector(classifier(window), tokenizer, **settings)


def test_labels_become_spans():
    found = detector(stride=2).detect(["anna bo met anna in paris", "today", ""])
    spans = [(span.entity, span.start, span.end) for span in found[0]]
    assert spans == [("PERSON", 0, 7), ("PERSON", 12, 16), ("PLACE", 20, 25)]
    assert found[1:] == [[], []]
    assert all(0 < span.score <= 1 for span in found[0])


def test_long_texts_are_read_in_windows():
    text = "met in " * 30 + "anna " + "today " * 10
    (spans,) = detector(window=16, stride=4, batch_size=3).detect([text])
    assert {(span.entity, span.start, span.end) for span in spans} == {("PERSON", 210, 214)}


def test_plain_labels_and_special_tokens():
    spans = list(
        label_spans(["X", "X", "O", "X"], [0.5, 1.0, 1.0, 1.0], [(0, 0), (0, 3), (3, 4), (5, 6)], [1, 0, 0, 0])
    )
    assert [(span.entity, span.start, span.end, span.score) for span in spans] == [("X", 0, 3, 1.0), ("X", 5, 6, 1.0)]


def test_describe_and_refusals():
    own = detector(stride=0)
    assert isinstance(own, PrivacyDetector)
    assert "B-PERSON" in own.describe()["labels"]
    with pytest.raises(ValueError, match="fast tokenizer"):
        TokenClassificationDetector(classifier(), object())
    with pytest.raises(ValueError, match="stride is 99"):
        detector(stride=99)


def test_presidio_patterns_need_no_network(monkeypatch):
    pytest.importorskip("presidio_analyzer", reason="presidio-analyzer is the optional extra 'pii'")

    def refuse(*arguments, **settings):
        raise AssertionError("the detector opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    own = PresidioDetector(entities=["EMAIL_ADDRESS", "CREDIT_CARD", "IBAN_CODE"])
    text = "jo@example.org paid with 4111111111111111"
    (spans,) = own.detect([text])
    assert {text[span.start : span.end] for span in spans} >= {"jo@example.org", "4111111111111111"}
    assert isinstance(own, PrivacyDetector)
    assert own.describe()["patterns_only"]


def test_presidio_missing_names_the_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    with pytest.raises(ImportError, match=r"fastdp-lm\[pii\]"):
        PresidioDetector()
