"""The benchmark of privatizing runs, and counts the tokens of the texts."""

import json

import pytest

pytest.importorskip("grpc", reason="its model and tokenizer are those of the split program's tests")

from bench import privatize
from tests.split.world import make_model, make_texts, make_tokenizer


def test_it_measures_every_setting(tmp_path):
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    texts, labels = make_texts(12)
    rows = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in zip(texts, labels, strict=True))]
    (tmp_path / "texts.tsv").write_text("\n".join(rows) + "\n")
    given = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "texts.tsv"), "--turns", "1"]
    privatize.main([*given, "--json", str(tmp_path / "speed.json")])
    figures = json.loads((tmp_path / "speed.json").read_text())["figures"]
    assert [(row["mechanism"], row["eta"]) for row in figures["rows"]] == privatize.SETTINGS
    assert all(row["tokens_per_second"] > 0 for row in figures["rows"])
    assert {row["tokens"] for row in figures["rows"]} == {sum(len(text.split()) for text in texts)}
