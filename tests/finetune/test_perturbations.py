"""Runs that privatize what they learn from: perturbed forward passes and replaced tokens."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from fastdp import accounting
from fastdp.accounting import Card, verify
from fastdp.data import causal_examples
from fastdp.finetune import ConfigError, finetune
from fastdp.methods import ewft
from fastdp.public import content_digest
from tests.finetune.runs import Stopped, classify, public_inputs


@pytest.mark.parametrize("noise", ["release_once", "dp_forward"])
def test_a_perturbed_forward_pass(config, files, tmp_path, noise):
    options = {
        "layer": 1,
        "autoencoder": [8],
        "noise": noise,
        "public": str(files / "public.tsv"),
    }
    result = finetune(classify(config, files, method="ewft", method_options=options, epochs=2))
    assert result.steps == 6
    assert 7.9 < result.epsilon <= 8
    assert "one user's sequence" in result.privacy
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert (card["unit"], card["adjacency"]) == ("one user's sequence", "replace_one")
    assert card["steps"]["spent"] == (1 if noise == "release_once" else 2)
    assert (tmp_path / "run" / "perturbation.pt").exists()
    (text,) = card["mechanism"]["public_text"]
    assert (text["name"], text["records"], text["shared"]) == ("public.tsv", 48, 0)
    assert text["sha256"] == content_digest(files / "public.tsv")


@pytest.mark.parametrize("rehearsed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_pure_forward_pass(config, files, tmp_path, rehearsed):
    learning = {"public": str(files / "public.tsv")}
    if rehearsed:
        learning = {"rehearsal": {"public": str(files / "public.tsv"), "examples": 24, "passes": 1}}
    options = {"layer": 1, "noise": "codebook", "cells": 3, **learning}
    settings = classify(config, files, method="ewft", method_options=options, epochs=2, epsilon=3.0)
    result = finetune(settings)
    assert result.steps == 6
    assert result.epsilon == 3.0
    assert "without a delta" in result.privacy
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert (card["kind"], card["budget"]["of_a_text"]) == ("pure", 3.0)
    assert card["mechanism"]["encoder"] == "public text, with labels"
    assert verify(card).guarantee
    assert (tmp_path / "run" / "perturbation.pt").exists()
    elsewhere = str(tmp_path / "other")
    for fault, words in (
        ({"noise": "codebook", "layer": 1}, "learns from public text"),
        (options | {"autoencoder": [4]}, "autoencoder"),
        (options | {"cells": 1}, "at least"),
    ):
        with pytest.raises(ConfigError, match=words):
            finetune(replace(settings, method_options=fault, output=elsewhere))


def test_an_interrupt_before_any_release_leaves_nothing_to_stumble_over(config, files, tmp_path, monkeypatch):
    """While the autoencoder learns, the ledger is there already; the same command goes on as if nothing had been.

    Neither the folder nor the account holds that anything was released.
    """
    monkeypatch.setenv("FASTDP_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("FASTDP_AGAIN")

    def interrupted(*_, **__):
        raise Stopped

    method, options = public_inputs(str(files / "public.tsv"))["autoencoder"]
    settings = classify(config, files, method=method, method_options=options, epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr(ewft.EWFT, "train_autoencoder", interrupted)
        with pytest.raises(Stopped):
            finetune(settings)
    assert not list((tmp_path / "run").rglob("*.jsonl"))
    assert finetune(settings).steps == 3


def test_layers_below_the_noise_learn_from_public_text_alone(config, files, tmp_path, monkeypatch):
    options = {
        "layer": 1,
        "autoencoder": [8],
        "rehearsal": {"public": str(files / "public.tsv"), "examples": 12, "passes": 2, "learning_rate": 0.01},
    }
    settings = classify(config, files, method="ewft", method_options=options, epochs=1)
    learned = []

    def rehearse(model, *args, **kwargs):
        below = next(p for name, p in model.named_parameters() if ".h.0." in name and "lora_B" in name)
        before = below.detach().clone()
        losses = rehearsed(model, *args, **kwargs)
        learned.append(not torch.equal(below, before))
        return losses

    rehearsed = ewft.rehearse
    monkeypatch.setattr(ewft, "rehearse", rehearse)
    result = finetune(settings)
    assert learned == [True]
    assert 7.9 < result.epsilon <= 8
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert card["guarantee"] != "none"
    assert card["mechanism"]["public_text"][0]["sha256"] == content_digest(files / "public.tsv")
    with pytest.raises(ConfigError, match="leave public out beside it"):
        finetune(replace(settings, method_options=options | {"public": "x.tsv"}, output=str(tmp_path / "other")))
    again = {**options, "rehearsal": {"public": "x.tsv", "rate": 1}}
    with pytest.raises(ConfigError, match="rehearsal must be a mapping of public"):
        finetune(replace(settings, method_options=again, output=str(tmp_path / "other")))
    monkeypatch.setattr(ewft, "rehearse", lambda *args, **kwargs: pytest.fail("rehearsed before it refused"))
    for fault in ({"bottom": "x"}, {"layer": 9}, {"sequence_length": 8}, {"max_norm": -1.0}, {"unknown": 1}):
        with pytest.raises(ConfigError, match=str(next(iter(fault)))):
            finetune(replace(settings, method_options=options | fault, output=str(tmp_path / "other")))


@pytest.fixture
def executed(monkeypatch):
    """The examples that runs train on and are evaluated on."""
    from fastdp.finetune import run

    seen, execute = [], run.FinetuneRun.execute
    monkeypatch.setattr(
        run.FinetuneRun,
        "execute",
        lambda self, resume: seen.extend([self.train, self.held_out]) or execute(self, resume),
    )
    return seen


def test_text_is_privatized_before_training(config, tmp_path, executed):
    settings = replace(config, epsilon=None, method="sap", method_options={"eta": 20.0, "duplicates": "merge"})
    result = finetune(settings)
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    texts = [json.loads(line)["text"] for line in Path(config.train).read_text().splitlines()]
    plain = causal_examples(tokenizer, texts, 48)
    same = total = 0
    for private, item in zip(executed[0].items, plain.items):
        assert len(private["input_ids"]) == len(item["input_ids"])
        assert private["labels"] == private["input_ids"], "labels would give the text away"
        same += sum(a == b for a, b in zip(private["input_ids"], item["input_ids"]))
        total += len(item["input_ids"])
    assert same < 0.9 * total
    statement = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert statement["eta"] == 20.0
    assert not (tmp_path / "run" / "card.json").exists()
    assert "stay what they are" in result.privacy


@pytest.mark.parametrize("task", ["causal-lm", "classification"])
def test_special_tokens_that_a_text_spells_out_are_privatized(config, tmp_path, executed, task):
    """The token itself, anywhere but where the encoder put it, would be text that leaves in the clear."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    special = tokenizer.eos_token
    texts = tmp_path / "spelled.jsonl"
    rows = [{"text": f"{special} Anna {special} takes{special}", "label": str(i % 2)} for i in range(24)]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"eta": 1e-3, "duplicates": "merge"}
    settings = replace(
        config, epsilon=None, method="sap", method_options=options, train=str(texts), eval=str(texts), task=task
    )
    if task == "classification":
        settings.labels = ["0", "1"]
    finetune(settings)
    for examples in executed:
        for item in examples.items:
            assert set(item) == {"input_ids", "labels"} | ({"token_type_ids"} & set(item))
            ends = 0 if task == "classification" else 2
            assert item["input_ids"].count(tokenizer.eos_token_id) == ends
            assert len(item["input_ids"]) > ends + 6


def test_a_second_run_of_the_same_texts_is_refused_or_said(config, files, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDP_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("FASTDP_AGAIN")
    options = {"epsilon": None, "method": "sap", "method_options": {"eta": 20.0, "duplicates": "merge"}}
    finetune(classify(config, files, **options))
    with pytest.raises(ValueError, match="these data were released before, by sap to .*run on"):
        finetune(classify(config, files, **options, output=str(tmp_path / "second")))
    assert not (tmp_path / "second" / "config.yaml").exists()
    monkeypatch.setenv("FASTDP_AGAIN", "1")
    finetune(classify(config, files, **options, output=str(tmp_path / "second")))
    assert len(Card.load(tmp_path / "second" / "statement.json")["earlier_releases"]) == 1


def test_private_tokens_are_replaced_and_not_learned(config, tmp_path, executed):
    """What is trained on has the words that no detector found, in their places, and labels for these alone."""
    texts = tmp_path / "private.jsonl"
    lines = [f"Anna paid {1000 + i} at the caf\u00e9 with card 4111 1111 1111 1111 on Monday." for i in range(24)]
    texts.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    options = {"epsilon": 6.0, "mechanism": "typed", "replacement": "model", "names": ["Quorra"]}
    settings = {"epsilon": None, "method": "selective", "method_options": options}
    result = finetune(replace(config, **settings, train=str(texts), eval=str(texts)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    card = Card.load(tmp_path / "run" / "card.json")
    assert accounting.verify(card).guarantee
    assert "Quorra" not in json.dumps(card)
    assert result.privacy.startswith(card["bound"])
    trained, held_out = executed
    hidden = sum(label == -100 for item in trained.items for label in item["labels"])
    assert hidden == card["tokens"]["private"] > 24 * 8
    for line, item, plain in zip(lines, trained.items, held_out.items, strict=True):
        assert line in tokenizer.decode(plain["input_ids"])
        assert len(item["input_ids"]) == len(plain["input_ids"])
        kept = [token for token, label in zip(item["input_ids"], item["labels"]) if label != -100]
        assert "at the caf\u00e9 with card" in tokenizer.decode(kept)
        assert "4111" not in tokenizer.decode(kept)


def test_contributing_tokens_of_a_text(config, files, tmp_path):
    cti = {"form": "prior", "noise_multiplier": 2.0, "max_norm": 3.0}
    settings = {"epsilon": None, "method": "sap"}
    options = {"eta": 20.0, "duplicates": "merge", "cti": cti}
    result = finetune(classify(config, files, **settings, method_options=options))
    counts = Card.load(tmp_path / "run" / "statement.json")["also"][0]["epsilon"]["upper_bound"]
    assert counts == pytest.approx(accounting.epsilon(accounting.gaussian(2.0), config.delta))
    assert f"epsilon {counts:.3f} at delta 0.001 for the counts" in result.privacy
    known = options | {"cti": {"public": str(files / "public.tsv"), "min_support": 1}}
    finetune(classify(config, files, **settings, method_options=known, output=str(tmp_path / "known")))
    statement = json.loads((tmp_path / "known" / "statement.json").read_text())
    assert statement["mechanism"]["cti"]["counts"] == "public"
    assert statement["mechanism"]["cti"]["public_text"]["sha256"] == content_digest(files / "public.tsv")
    # The paper's form runs, and says what it is.
    printed = {"eta": 20.0, "duplicates": "merge", "cti": {"form": "paper"}}
    result = finetune(classify(config, files, **settings, method_options=printed, output=str(tmp_path / "printed")))
    assert result.privacy.startswith("none: eta depends on the token")
    for wrong, match in (
        ({"form": "prior"}, "reveal them"),
        ({"form": "prior", "noise": 2.0}, "CTI has no option 'noise'"),
        ("prior", "must be a mapping"),
    ):
        with pytest.raises(ConfigError, match=match):
            finetune(
                classify(config, files, **settings, method_options=options | {"cti": wrong}, output=str(tmp_path / "x"))
            )
    with pytest.raises(ConfigError, match="task: classification"):
        finetune(replace(config, **settings, method_options=options, output=str(tmp_path / "x")))
    assert not (tmp_path / "x" / "config.yaml").exists()


@pytest.mark.parametrize("kind", public_inputs(""))
def test_private_data_does_not_pass_for_public(config, files, tmp_path, kind):
    """By whatever method: some of it, in another order and spacing. `tests/test_public.py` has copies of other kinds."""
    head, *rows = (files / "labels.tsv").read_text().splitlines()
    dressed = tmp_path / "dressed.tsv"
    dressed.write_text("\n".join([head, *(row.replace(". ", " .  ") for row in rows[::-1][:9])]) + "\n")
    method, options = public_inputs(str(dressed))[kind]
    settings = classify(config, files, method=method, method_options=options, epsilon=None if method == "sap" else 8.0)
    with pytest.raises(ValueError, match=r"9 of 9 records are private ones \(the first: line 2\)"):
        finetune(settings)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_shared_records_that_are_confirmed_stand_on_the_card(config, files, tmp_path):
    rows = (files / "public.tsv").read_text() + (files / "labels.tsv").read_text().splitlines(keepends=True)[1]
    (tmp_path / "some.tsv").write_text(rows)
    method, options = public_inputs(str(tmp_path / "some.tsv"))["autoencoder"]
    settings = classify(config, files, method=method, method_options=options, epochs=1)
    with pytest.raises(ConfigError, match="1 of 49 records"):
        finetune(settings)
    finetune(replace(settings, public_overlap=1))
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert card["mechanism"]["public_text"][0]["shared"] == 1
