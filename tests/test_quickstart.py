"""The quickstart's texts and model; the whole of it, which takes minutes, in the slow tier."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from fastdp.cli import app
from fastdp.data import Collator, causal_examples
from fastdp.finetune.evaluation import evaluate
from fastdp.quickstart import MODEL
from fastdp.quickstart.corpus import private_records, public_text


def test_texts_are_functions_of_the_seed():
    assert private_records(20, 3) == private_records(20, 3)
    assert private_records(20, 3) != private_records(20, 4)
    assert private_records(30, 3)[:20] == private_records(20, 3)
    assert public_text(5, 3) == public_text(5, 3)


def test_every_record_is_of_another_person():
    records = private_records(2_000, 0)
    names = {record.removeprefix("Patient: ").partition(",")[0] for record in records}
    assert len(names) == 2_000


def test_the_model_knows_public_prose_and_not_the_records():
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    public = causal_examples(tokenizer, public_text(40, seed=1), 128)
    private = causal_examples(tokenizer, private_records(40, seed=1), 128)
    known = evaluate(model, public, Collator(0), 40, "causal-lm").perplexity
    unknown = evaluate(model, private, Collator(0), 40, "causal-lm").perplexity
    assert known < 6
    assert unknown > 3 * known


def test_the_model_is_small_and_encodes_any_text():
    size = sum(entry.stat().st_size for entry in Path(MODEL).iterdir())
    assert size <= 4 * 2**20
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    text = "Any text at all: \u00e9, \u4e2d, \U0001f600."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_too_few_records_are_refused_before_anything_is_written(tmp_path):
    result = CliRunner().invoke(app, ["quickstart", "--output", str(tmp_path / "runs"), "--records", "200"])
    assert result.exit_code == 1
    assert "200 records are fewer than a batch of 256" in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_quickstart_learns_with_privacy(tmp_path):
    output = tmp_path / "quickstart"
    result = CliRunner().invoke(app, ["quickstart", "--output", str(output)])
    assert result.exit_code == 0, result.output
    runs = {folder.name: json.loads((folder / "result.json").read_text()) for folder in output.glob("*/")}
    private, plain = runs["epsilon-8"], runs["without-privacy"]
    assert private["epsilon"] <= 8
    assert plain["after"]["perplexity"] < private["after"]["perplexity"]
    assert private["after"]["perplexity"] < private["before"]["perplexity"] / 2
    again = CliRunner().invoke(app, ["quickstart", "--output", str(output)])
    assert again.exit_code != 0
    assert "already holds a quickstart" in again.stderr
