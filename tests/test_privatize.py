"""`fastdp privatize`: what it writes, what it leaves out, and what it refuses."""

import csv
import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tests.test_cli import refused, run

WORDS = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(60))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(path)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    BertModel(config).save_pretrained(path)
    return path


@pytest.fixture
def reviews(tmp_path):
    path = tmp_path / "reviews.csv"
    rows = [[f"w{i % 60} w{(7 * i) % 60}", i % 2, f"user{i}"] for i in range(50)]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["text", "label", "name"], *rows])
    return path


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_only_the_text_and_the_columns_asked_for_are_written(folder, reviews, tmp_path, kind):
    out = tmp_path / f"private.{kind}"
    result = run("privatize", reviews, out, "--eta", 1e6, "--model", folder, "--keep", "label")
    assert result.exit_code == 0, result.output
    content = out.read_text()
    assert "user" not in content
    lines = content.splitlines()
    if kind == "jsonl":
        assert json.loads(lines[8]) == {"text": "w8 w56", "label": "0"}
    else:
        assert lines[0].replace("\t", ",") == "text,label"
        assert lines[9].replace("\t", ",") == "w8 w56,0"
    statement = json.loads((tmp_path / "private.privacy.json").read_text())
    assert statement["eta"] == 1e6
    assert statement["displacement"]["unchanged"] == 1.0
    assert statement["tokens_released"] == 100
    assert statement["columns_copied_unprotected"] == ["label"]
    assert "100.0% of the vocabulary" in result.output


def test_small_eta_and_ids(folder, reviews, tmp_path):
    out = tmp_path / "ids.jsonl"
    result = run("privatize", reviews, out, "--eta", 1, "--model", folder, "--ids", "--mechanism", "exponential")
    assert result.exit_code == 0, result.output
    ids = [json.loads(line)["input_ids"] for line in out.read_text().splitlines()]
    assert all(len(row) == 2 for row in ids)
    assert sum(row[0] == 2 + i % 60 for i, row in enumerate(ids)) < 25


def test_refusals(folder, reviews, tmp_path):
    out = tmp_path / "out.csv"
    plan = (reviews, out, "--model", folder)
    for eta in (0, -1, "nan"):
        assert "above 0" in refused("privatize", *plan, "--eta", eta)
    assert "no column" in refused("privatize", *plan, "--eta", 1, "--text-column", "review")
    assert "leave it out" in refused("privatize", *plan, "--eta", 1, "--keep", "text")
    assert "OUT is IN" in refused("privatize", reviews, reviews, "--eta", 1, "--model", folder)
    assert "no known kind" in refused("privatize", reviews, tmp_path / "out.pdf", "--eta", 1, "--model", folder)
    assert "--ids needs" in refused("privatize", *plan, "--eta", 1, "--ids")
    assert "texts alone" in refused(
        "privatize", reviews, tmp_path / "out.txt", "--eta", 1, "--model", folder, "--keep", "label"
    )
    assert not out.exists()
    out.write_text("kept")
    assert "--overwrite" in refused("privatize", *plan, "--eta", 1)
    assert out.read_text() == "kept"
    unknown = tmp_path / "unknown.txt"
    unknown.write_text("w1\nzzz\n")
    target = tmp_path / "unknown.private.txt"
    assert "unknown token" in refused(
        "privatize", unknown, target, "--eta", 1, "--model", folder, "--unknown", "refuse"
    )
    assert not target.exists()
    assert not list(tmp_path.glob(".unknown*"))
