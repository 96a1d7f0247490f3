"""A whole run on a tiny model: what it writes, what it refuses, and how it goes on after being stopped."""

import csv
import json
import math
import shutil
from importlib import resources
from pathlib import Path

import peft
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from fastdp import accounting
from fastdp.accounting import Card, verify
from fastdp.data import Collator, causal_examples
from fastdp.finetune import ConfigError, FinetuneConfig, Reporter, finetune, load_config
from fastdp.finetune.evaluation import evaluate
from fastdp.methods import ewft
from fastdp.public import content_digest
from fastdp.quickstart.corpus import private_records


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A random GPT-2 of two layers with the tokenizer of the quickstart's model."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(resources.files("fastdp.quickstart") / "model"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Records as JSON lines, as prompt and target columns, and with labels."""
    folder = tmp_path_factory.mktemp("data")
    records = private_records(48, seed=1)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": record}) + "\n" for record in records))
    with open(folder / "pairs.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mr", "ref"])
        writer.writerows(record.split(". ", 1) for record in records)
    lines = [f"{record}\t{'often' if 'twice' in record else 'seldom'}\n" for record in records]
    (folder / "labels.tsv").write_text("sentence\tlabel\n" + "".join(lines))
    others = private_records(48, seed=2)
    (folder / "public.jsonl").write_text("".join(json.dumps({"text": record}) + "\n" for record in others))
    lines = [f"{record}\t{'often' if 'twice' in record else 'seldom'}\n" for record in others]
    (folder / "public.tsv").write_text("sentence\tlabel\n" + "".join(lines))
    return folder


@pytest.fixture
def config(model_folder, files, tmp_path):
    return FinetuneConfig(
        model=str(model_folder),
        train=str(files / "text.jsonl"),
        eval=str(files / "text.jsonl"),
        output=str(tmp_path / "run"),
        epsilon=8.0,
        delta=1e-3,
        max_length=48,
        epochs=1,
        batch_size=16,
        physical_batch_size=8,
        checkpoint_every=2,
        lora_r=2,
        bottleneck_size=4,
        prompt_tokens=3,
    )


def with_settings(config, **settings):
    return FinetuneConfig(**{**vars(config), **settings})


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def test_lora_run_writes_everything_and_loads_in_plain_peft(config, model_folder, tmp_path, monkeypatch):
    seen = {}

    def remember(model, *args):
        seen["logits"] = logits(model, torch.arange(1, 13).reshape(2, 6))
        return original(model, *args)

    from fastdp.finetune import run

    original = run.save_weights
    monkeypatch.setattr(run, "save_weights", remember)
    result = finetune(config)
    output = tmp_path / "run"
    assert {path.name for path in output.iterdir()} >= {
        *("adapter", "card.json", "card.md", "config.yaml", "metrics.jsonl", "result.json", "loss.png", "epsilon.png"),
    }
    assert not (output / "checkpoint.pt").exists()
    assert 0 < result.epsilon <= 8
    assert result.steps == 3
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[-1]["epsilon"] == pytest.approx(result.epsilon)
    assert all(set(row["unprotected"]) == {"loss", "seconds"} for row in rows), "functions of what was drawn are marked"
    assert load_config(output / "config.yaml") == config
    base = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, output / "adapter")
    assert torch.equal(logits(loaded, torch.arange(1, 13).reshape(2, 6)), seen["logits"])


@pytest.mark.parametrize("kind", ["full", "bitfit", "bottleneck", "prompt", "ia3"])
def test_every_kind_of_fine_tuning_runs_and_loads(config, kind, model_folder, tmp_path):
    result = finetune(with_settings(config, peft=kind, epochs=1, batch_size=24, learning_rate=0.05))
    assert 0 < result.epsilon <= 8
    assert result.before.perplexity != result.after.perplexity
    output = tmp_path / "run"
    if kind in ("full", "bitfit"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(output / "model")
    else:
        base = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        loaded = peft.PeftModel.from_pretrained(base, output / "adapter")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    texts = [json.loads(line)["text"] for line in Path(config.eval).read_text().splitlines()]
    again = evaluate(loaded, causal_examples(tokenizer, texts, 48), Collator(0), 5, "causal-lm")
    assert again.perplexity == pytest.approx(result.after.perplexity, rel=1e-5)


def test_without_privacy_the_same_path_learns(config):
    result = finetune(with_settings(config, peft="full", epsilon=math.inf, epochs=4, learning_rate=0.01))
    assert math.isinf(result.epsilon)
    assert result.noise_multiplier == 0
    assert result.after.loss < result.before.loss - 0.3
    assert json.loads((Path(config.output) / "result.json").read_text())["epsilon"] == "inf"


# Every record is sampled: of 48, a fiftieth would often be none.
PAPER = {"mode": "paper", "source": {"kind": "private", "sample_rate": 1.0}}
RAPFT = {"irrelevance_ratio": 0.6, "allocation": "optimal", "map_after": 1}


@pytest.mark.parametrize(
    ("peft_kind", "method", "options", "kinds"),
    [
        ("lora", "rapft", {**RAPFT, "source": {"kind": "noisy", "noise_multiplier": 4.0, "sample_rate": 0.2}}, 2),
        ("bitfit", "rapft", {**RAPFT, "source": {"kind": "public", "data": "PUBLIC", "examples": 6}}, 1),
        ("full", "rapft", {**PAPER, "propagation": {"rule": "alpha_beta"}}, 1),
        ("full", "frost", {"unfreezing_ratio": 0.5, "selection_steps": 2, "selection_rate": 0.2}, 2),
    ],
)
def test_methods_by_their_options(config, files, tmp_path, peft_kind, method, options, kinds):
    source = options.get("source", {})
    if source.get("data") == "PUBLIC":
        options = {**options, "source": {**source, "data": str(files / "public.jsonl")}}
    result = finetune(with_settings(config, peft=peft_kind, method=method, method_options=options, epochs=2))
    assert result.steps == 6
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert card["mechanism"]["name"] == {"rapft": "Rap-FT", "frost": "DP-FROST"}[method]
    if options.get("mode") == "paper":
        # No figure of a run without a guarantee may look like one.
        assert result.epsilon == math.inf
        assert result.privacy == f"none: {card['why_no_guarantee'][0]}"
    else:
        assert 0 < result.epsilon <= 8
        assert result.privacy is None
    assert (card["guarantee"] == "none") == (options.get("mode") == "paper")
    assert json.dumps(card["event"]).count("poisson_sampled") == kinds
    assert result.before.perplexity != result.after.perplexity


def classify(config, files, **settings):
    labelled = str(files / "labels.tsv")
    options = {"task": "classification", "text_column": "sentence", "labels": ["often", "seldom"]}
    return with_settings(config, train=labelled, eval=labelled, **options, **settings)


@pytest.mark.parametrize("noise", ["release_once", "epoch_weighted"])
def test_a_perturbed_forward_pass(config, files, tmp_path, noise):
    options = {
        "layer": 1,
        "autoencoder": [8],
        "noise": noise,
        "public": str(files / "public.tsv"),
        "public_examples": 9,
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


@pytest.mark.parametrize("noise", ["codebook", pytest.param("privunit", marks=pytest.mark.slow)])
def test_a_pure_forward_pass(config, files, tmp_path, noise):
    number = {"cells": 3} if noise == "codebook" else {"dimension": 2}
    learning = {"public": str(files / "public.tsv"), "public_examples": 24}
    if noise == "codebook":
        learning = {"rehearsal": {"public": str(files / "public.tsv"), "examples": 24, "passes": 1}}
    options = {"layer": 1, "noise": noise, **number, **learning}
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
        ({"noise": noise, "layer": 1}, "learns from public text"),
        (options | {"autoencoder": [4]}, "autoencoder"),
        (options | {next(iter(number)): 1}, "at least"),
    ):
        with pytest.raises(ConfigError, match=words):
            finetune(with_settings(settings, method_options=fault, output=elsewhere))


def test_an_interrupt_before_any_release_leaves_nothing_to_stumble_over(config, files, tmp_path, monkeypatch):
    """While the autoencoder learns, the ledger is there already; the same command goes on as if nothing had been."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    method, options = public_inputs(str(files / "public.tsv"))["autoencoder"]
    settings = classify(config, files, method=method, method_options=options, epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr(ewft.EWFT, "train_autoencoder", interrupted)
        with pytest.raises(KeyboardInterrupt):
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
        finetune(with_settings(settings, method_options=options | {"public": "x.tsv"}, output=str(tmp_path / "other")))
    again = {**options, "rehearsal": {"public": "x.tsv", "rate": 1}}
    with pytest.raises(ConfigError, match="rehearsal must be a mapping of public"):
        finetune(with_settings(settings, method_options=again, output=str(tmp_path / "other")))
    monkeypatch.setattr(ewft, "rehearse", lambda *args, **kwargs: pytest.fail("rehearsed before it refused"))
    for fault in ({"bottom": "x"}, {"layer": 9}, {"sequence_length": 8}, {"max_norm": -1.0}, {"unknown": 1}):
        with pytest.raises(ConfigError, match=str(next(iter(fault)))):
            finetune(with_settings(settings, method_options=options | fault, output=str(tmp_path / "other")))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "rapft", "method_options": {"relevance": 1}}, "has no option 'relevance'"),
        ({"method": "frost", "method_options": {"gamma": 1}}, "has no option 'gamma'"),
        ({"method": "rapft", "method_options": {"source": {"kind": "nosy"}}}, "choose one of public, noisy"),
        ({"method": "ewft", "method_options": {"laier": 1}}, "laier"),
        ({"method": "ewft", "method_options": {"autoencoder": None, "noise": "loud"}}, "noise of ewft is 'loud'"),
        ({"method": "sap", "epsilon": None, "method_options": {"eta": 1.0, "teta": 1}}, "teta"),
        ({"method": "sap", "epsilon": None, "method_options": {}}, "needs eta"),
        ({"method": "selective", "epsilon": None, "method_options": {}}, "needs epsilon, of a private token"),
        (
            {"method": "selective", "epsilon": None, "method_options": {"epsilon": 1, "mechanism": "tiped"}},
            "mechanism is 'tiped'",
        ),
        ({"lora_fixed": True, "peft": "bitfit"}, "lora_fixed belongs to peft: lora"),
        ({"method": "sap", "epsilon": None, "method_options": {"eta": -1.0}}, "eta is -1.0"),
        ({"method": "sap", "epsilon": None, "method_options": {"epsilon": 1.0}}, "quotient"),
        ({"method": "ewft", "method_options": {"autoencoder": None, "max_norm": -1.0}}, "max_norm is -1.0"),
        ({"device": "abacus"}, "device abacus cannot be used"),
    ],
)
def test_settings_are_refused_before_anything_is_read_loaded_or_made(config, tmp_path, monkeypatch, changes, words):
    from fastdp.finetune import run

    for name in ("read_rows", "check_model", "load_tokenizer", "load_trained"):
        monkeypatch.setattr(run, name, lambda *_, name=name: pytest.fail(f"{name} came before the refusal"))
    with pytest.raises(ConfigError, match=words):
        finetune(with_settings(config, **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("delta", "refused"), [(1 / 48, True), (0.5, True), (1 / 49, False)])
def test_a_delta_that_would_publish_whole_records_is_refused_unless_confirmed(config, monkeypatch, delta, refused):
    from fastdp.finetune import run

    def loading(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "load_trained", loading)
    settings = with_settings(config, delta=delta)
    with pytest.raises(ConfigError if refused else KeyboardInterrupt):
        finetune(settings)
    with pytest.raises(KeyboardInterrupt):
        finetune(with_settings(settings, large_delta=True))


def test_an_output_that_cannot_be_written_is_refused_in_words(config, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="file is a file and not a folder"):
            finetune(with_settings(config, output=str(output)))
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    with pytest.raises(ConfigError, match="nowhere is a file and not a folder"):
        finetune(with_settings(config, output=str(tmp_path / "nowhere")))
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match="nothing can be written to"):
        finetune(config)


@pytest.mark.parametrize("given", ["a,b", "a, b", "[a, b]", '["a","b"]', "['a', 'b']", ["a", "b"]])
def test_lists_are_read_as_their_message_suggests(given):
    assert load_config(None, {"labels": given}).labels == ["a", "b"]
    for wrong in ("[a, b", "[[a], b]"):
        with pytest.raises(ConfigError, match="labels must be a list"):
            load_config(None, {"labels": wrong})


def public_inputs(path):
    """Every method that takes public text, with that text at a path."""
    ewft_options = {"layer": 1, "autoencoder": [8]}
    return {
        "rapft": ("rapft", {**RAPFT, "source": {"kind": "public", "data": path, "examples": 6}}),
        "autoencoder": ("ewft", ewft_options | {"public": path}),
        "rehearsal": ("ewft", ewft_options | {"rehearsal": {"public": path}}),
        "codebook": ("ewft", {"noise": "codebook", "public": path}),
        "cti": ("sap", {"eta": 20.0, "duplicates": "merge", "cti": {"public": path, "min_support": 1}}),
        "quotient": ("sap", {"epsilon": 2.0, "cti": {"form": "quotient", "cells": 3, "public": path}}),
    }


@pytest.mark.parametrize("kind", public_inputs(""))
def test_private_data_does_not_pass_for_public(config, files, tmp_path, kind):
    """Neither the training file, nor a copy, nor a copy in another order and other letters, by whatever method."""
    head, *rows = (files / "labels.tsv").read_text().splitlines()
    (tmp_path / "copy.tsv").write_text("\n".join([head, *rows]) + "\n")
    (tmp_path / "dressed.tsv").write_text(
        "\n".join([head, *(row.replace(". ", " .  ") for row in rows[::-1][:9])]) + "\n"
    )
    for path, words in (
        (files / "labels.tsv", "is the private data itself"),
        (tmp_path / "copy.tsv", "is the private data itself"),
        (tmp_path / "dressed.tsv", r"9 of its 9 records are among the private ones \(the first in line 2\)"),
    ):
        method, options = public_inputs(str(path))[kind]
        settings = classify(
            config, files, method=method, method_options=options, epsilon=None if method == "sap" else 8.0
        )
        with pytest.raises(ValueError, match=words):
            finetune(settings)
        assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_shared_records_that_are_confirmed_stand_on_the_card(config, files, tmp_path):
    rows = (files / "public.tsv").read_text() + (files / "labels.tsv").read_text().splitlines(keepends=True)[1]
    (tmp_path / "some.tsv").write_text(rows)
    method, options = public_inputs(str(tmp_path / "some.tsv"))["autoencoder"]
    settings = classify(config, files, method=method, method_options=options, epochs=1)
    with pytest.raises(ConfigError, match="1 of its 49 records"):
        finetune(settings)
    finetune(with_settings(settings, public_overlap=1))
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert card["mechanism"]["public_text"][0]["shared"] == 1


def test_text_is_privatized_before_training(config, files, tmp_path, monkeypatch):
    from fastdp.finetune import run

    seen = []
    original = run._Run.execute
    monkeypatch.setattr(run._Run, "execute", lambda self, resume: (seen.append(self.train), original(self, resume))[1])
    settings = with_settings(config, epsilon=None, method="sap", method_options={"eta": 20.0, "duplicates": "merge"})
    result = finetune(settings)
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    texts = [json.loads(line)["text"] for line in Path(config.train).read_text().splitlines()]
    plain = causal_examples(tokenizer, texts, 48)
    same = total = 0
    for private, item in zip(seen[0].items, plain.items):
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
def test_special_tokens_that_a_text_spells_out_are_privatized(config, files, tmp_path, monkeypatch, task):
    """The token itself, anywhere but where the encoder put it, would be text that leaves in the clear."""
    from fastdp.finetune import run

    seen = []

    def stop(self, resume):
        seen.extend([self.train, self.held_out])
        raise KeyboardInterrupt

    monkeypatch.setattr(run._Run, "execute", stop)
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    special = tokenizer.eos_token
    texts = tmp_path / "spelled.jsonl"
    rows = [{"text": f"{special} Anna {special} takes{special}", "label": str(i % 2)} for i in range(24)]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"eta": 1e-3, "duplicates": "merge"}
    settings = with_settings(
        config, epsilon=None, method="sap", method_options=options, train=str(texts), eval=str(texts), task=task
    )
    if task == "classification":
        settings.labels = ["0", "1"]
    with pytest.raises(KeyboardInterrupt):
        finetune(settings)
    for examples in seen:
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


def test_private_tokens_are_replaced_and_not_learned(config, files, tmp_path, monkeypatch):
    """What is trained on has the words that no detector found, in their places, and labels for these alone."""
    from fastdp.finetune import run

    seen = []
    real = run._Run._seen
    monkeypatch.setattr(run._Run, "_seen", lambda self, *args, **kw: seen.append(real(self, *args, **kw)) or seen[-1])
    texts = tmp_path / "private.jsonl"
    lines = [f"Anna paid {1000 + i} at the caf\u00e9 with card 4111 1111 1111 1111 on Monday." for i in range(24)]
    texts.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    options = {"epsilon": 6.0, "mechanism": "typed", "replacement": "model", "names": ["Quorra"]}
    settings = {"epsilon": None, "method": "selective", "method_options": options}
    result = finetune(with_settings(config, **settings, train=str(texts), eval=str(texts)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    card = Card.load(tmp_path / "run" / "card.json")
    assert accounting.verify(card).guarantee
    assert "Quorra" not in json.dumps(card)
    assert result.privacy.startswith(card["bound"])
    trained, held_out = seen
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
        ({"form": "prior", "noise": 2.0}, "cti has no 'noise'"),
        ("prior", "must be a mapping"),
    ):
        with pytest.raises(ConfigError, match=match):
            finetune(
                classify(config, files, **settings, method_options=options | {"cti": wrong}, output=str(tmp_path / "x"))
            )
    with pytest.raises(ConfigError, match="task: classification"):
        finetune(with_settings(config, **settings, method_options=options, output=str(tmp_path / "x")))
    assert not (tmp_path / "x" / "config.yaml").exists()


def test_a_stopped_run_of_a_local_method_leaves_a_record_of_what_was_released(config, files, tmp_path):
    options = {"layer": 1, "autoencoder": None, "noise": "release_once"}
    settings = classify(config, files, method="ewft", method_options=options, epochs=2)
    with pytest.raises(SystemExit):
        finetune(settings, reporter=StopAfter(2))
    path = tmp_path / "run" / "releases" / "ledger.jsonl"
    assert accounting.Ledger.read(path).spent_steps == 1
    with pytest.raises(ConfigError, match="a second time, at the full price again"):
        finetune(settings, resume=True)
    with pytest.raises(ConfigError, match="already holds a run"):
        finetune(settings)
    # Ended before anything was released, it leaves none.
    with pytest.raises(ConfigError, match="stopped early"):
        finetune(with_settings(settings, output=str(tmp_path / "other")), reporter=Failing())
    assert not (tmp_path / "other" / "releases").exists()


def test_a_stopped_run_resumes_with_the_partitions_it_had_chosen(config, tmp_path):
    options = {"unfreezing_ratio": 0.5, "selection_steps": 2, "selection_rate": 0.2}
    settings = with_settings(config, peft="full", method="frost", method_options=options, epochs=4)
    with pytest.raises(SystemExit):
        finetune(settings, reporter=StopAfter(5))
    [kept] = (tmp_path / "run").glob("preparation-*")
    before = kept.read_bytes()
    result = finetune(settings, resume=True)
    assert kept.read_bytes() == before
    assert 0 < result.epsilon <= 8
    assert result.trained_parameters < sum(p.numel() for p in load_base(config).parameters()) / 2


def load_base(config):
    return transformers.AutoModelForCausalLM.from_pretrained(config.model)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("rapft", {"irelevance_ratio": 0.7}, "no option 'irelevance_ratio'; did you mean irrelevance_ratio"),
        ("rapft", {}, "breaks the guarantee"),
        ("rapft", {"source": {"kind": "public"}}, "needs data"),
        ("rapft", {"source": {"kind": "nosy"}}, "choose one of public, noisy"),
        ("rapft", {"source": "noisy"}, "must be a mapping"),
        ("rapft", {"source": {"kind": "noisy", "noise_multiplier": 1.0}}, "sample_rate"),
        ("frost", {"unfreezing_ratio": 2.0}, "must lie between 0 and 1"),
        ("frost", {"unfreezing_ratio": 1e-9}, "smallest"),
        ("dpsgd", {"groups": "each"}, "per_layer"),
        ("ewft", {}, "must learn from public text"),
        ("ewft", {"autoencoder": None, "noise": "brown"}, "choose one of release_once"),
        ("ewft", {"autoencoder": None, "layer": 7}, "layer"),
        ("ewft", {"autoencoder": None, "depth": 7}, "depth"),
        ("ewft", {"autoencoder": [4], "public": "missing.jsonl"}, "missing.jsonl"),
        ("sap", {"eta": 1.0}, "leave epsilon out"),
    ],
)
def test_a_method_that_cannot_be_made_leaves_nothing_behind(config, method, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        finetune(with_settings(config, method=method, method_options=options))
    left = list((tmp_path / "run").iterdir()) if (tmp_path / "run").exists() else []
    assert not left


def test_classification(config, files):
    settings = {"task": "classification", "text_column": "sentence", "labels": ["often", "seldom"]}
    data = {"train": str(files / "labels.tsv"), "eval": str(files / "labels.tsv")}
    result = finetune(with_settings(config, **settings, **data))
    assert 0 <= result.after.accuracy <= 1
    assert result.after.perplexity is None
    assert result.after.count == 48


def test_prompt_and_target_columns(config, files):
    data = {"train": str(files / "pairs.csv"), "eval": str(files / "pairs.csv")}
    result = finetune(with_settings(config, **data, prompt_column="mr", target_column="ref"))
    whole = finetune(with_settings(config, output=config.output + "2"))
    assert result.after.count < whole.after.count, "the prompt's tokens are not scored"


def test_perplexity_is_the_token_mean_of_transformers(model_folder, files):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    texts = [json.loads(line)["text"] for line in (files / "text.jsonl").read_text().splitlines()]
    examples = causal_examples(tokenizer, texts, 48)
    total = count = 0
    for example in examples:
        batch = Collator(0)([example])
        with torch.no_grad():
            loss = model(**batch).loss.item()
        tokens = len(example["input_ids"]) - 1
        total, count = total + loss * tokens, count + tokens
    for batch_size in (1, 7, 48):
        quality = evaluate(model, examples, Collator(0), batch_size, "causal-lm")
        assert quality.count == count
        assert quality.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)


class Failing(Reporter):
    """Refuses as the evaluation before training begins."""

    def phase(self, text):
        if text == "evaluating before training":
            raise ConfigError("stopped early")


class StopAfter(Reporter):
    """Ends the run like a kill would, after some steps: nothing after the step gets to run."""

    def __init__(self, steps):
        self.left = steps

    def step(self, *_):
        self.left -= 1
        if self.left == 0:
            raise SystemExit


def test_resume_keeps_spent_budget_and_ends_within_the_target(config, tmp_path):
    config = with_settings(config, epochs=4)
    with pytest.raises(SystemExit):
        finetune(config, reporter=StopAfter(7))
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    with pytest.raises(ConfigError, match="already holds a run"):
        finetune(config)
    with pytest.raises(ConfigError, match="these differ: learning_rate"):
        finetune(with_settings(config, learning_rate=1.0), resume=True)
    result = finetune(config, resume=True)
    assert result.epsilon <= 8
    assert result.before is not None
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, result.steps + 1))
    # Seven steps were released and six of them kept: the budget of twelve holds five more.
    assert 6 < result.steps <= 11
    with pytest.raises(ConfigError, match="is finished"):
        finetune(config, resume=True)


def test_a_resumed_run_keeps_the_matrices_that_were_drawn_and_not_trained(config, tmp_path, monkeypatch):
    """Another build of torch draws other numbers from the seed: those of the checkpoint count, and the adapter holds them."""
    from fastdp.finetune import models

    config = with_settings(config, lora_fixed=True, target_modules=["c_attn"])
    with pytest.raises(SystemExit):
        finetune(config, reporter=StopAfter(3))
    kept = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=False)["trained"]
    drawn = {name: value for name, value in kept.items() if "lora_A" in name}
    original = models.fix_lora_projections
    monkeypatch.setattr(models, "fix_lora_projections", lambda model: (torch.manual_seed(9), original(model))[1])
    result = finetune(config, resume=True)
    assert result.trained_parameters == sum(value.numel() for name, value in kept.items() if "lora_B" in name)
    saved = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert len(drawn) == 2
    for name, value in drawn.items():
        assert torch.equal(saved[name.replace(".default", "")], value)


def test_resume_before_the_first_checkpoint_starts_anew_but_remembers(config, tmp_path):
    with pytest.raises(SystemExit):
        finetune(config, reporter=StopAfter(1))
    result = finetune(config, resume=True)
    assert result.steps <= 2
    assert result.epsilon <= 8


def test_budget_spent_without_a_checkpoint_is_not_passed_off_as_a_run(config, tmp_path):
    config = with_settings(config, checkpoint_every=100)
    with pytest.raises(SystemExit):
        finetune(config, reporter=StopAfter(3))
    with pytest.raises(ConfigError, match="before its first checkpoint"):
        finetune(config, resume=True)
    assert not (tmp_path / "run" / "card.json").exists()


def test_stopped_between_training_and_writing_nothing_is_lost(config, monkeypatch):
    from fastdp.finetune import run

    original = run.save_weights

    def stop(*_):
        raise SystemExit

    monkeypatch.setattr(run, "save_weights", stop)
    with pytest.raises(SystemExit):
        finetune(config)
    monkeypatch.setattr(run, "save_weights", original)
    result = finetune(config, resume=True)
    assert result.steps == 3
    assert result.after.perplexity != result.before.perplexity


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "./absent/model"}, "there is no model folder"),
        ({"train": "absent.csv"}, "there is no file absent.csv"),
        ({"text_column": "body"}, "has no column 'body'"),
        ({"batch_size": 49}, "exceeds the 48 training examples"),
        ({"max_length": 65}, "has 64 positions, too few for 65"),
        ({"peft": "prompt", "max_length": 62}, "too few for 65"),
        ({"peft": "lora", "target_modules": ["absent"]}, "does not fit"),
        ({"device": "cuda:99"}, "cannot be used"),
    ],
)
def test_refusals_leave_nothing_behind(config, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        finetune(with_settings(config, **settings))
    left = list((tmp_path / "run").iterdir()) if (tmp_path / "run").exists() else []
    assert not left


def test_an_unknown_label_names_its_line(config, files):
    settings = {"task": "classification", "text_column": "sentence", "labels": ["often", "never"]}
    with pytest.raises(ValueError, match=r"labels\.tsv, line \d+: label 'seldom' is not one of labels: often, never"):
        finetune(with_settings(config, **settings, train=str(files / "labels.tsv"), eval=None))


def test_a_checkpoint_of_another_model_is_refused(config, tmp_path):
    with pytest.raises(SystemExit):
        finetune(with_settings(config, epochs=4), reporter=StopAfter(3))
    other = with_settings(config, epochs=4, lora_r=3, output=str(tmp_path / "other"))
    with pytest.raises(SystemExit):
        finetune(other, reporter=StopAfter(3))
    shutil.copy(tmp_path / "run" / "checkpoint.pt", tmp_path / "other" / "checkpoint.pt")
    with pytest.raises(ConfigError, match="of another model"):
        finetune(other, resume=True)
    assert (tmp_path / "other" / "ledger.jsonl").exists(), "a refused resume must not forget what was spent"


def test_settings_from_yaml_and_flags(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("learning_rate: 1e-3\nepsilon: inf\nlabels: [0, 1]\nmax_length: 64.0\n")
    config = load_config(
        path, {"epsilon": 3, "labels": "yes,no", "method_options": "{groups: per_layer}", "model": None}
    )
    assert config.method_options == {"groups": "per_layer"}
    assert config.learning_rate == 1e-3
    assert config.epsilon == 3
    assert config.labels == ["yes", "no"]
    assert config.max_length == 64
    assert config.model is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning_rate: 1", "unknown setting 'lerning_rate'; did you mean learning_rate"),
        ("zzzz: 1", "known settings: model"),
        ("learning_rate: fast", "learning_rate must be a number, not 'fast'"),
        ("epochs: [1]", "epochs must be a number"),
        ("batch_size: 1.5", "batch_size must be a whole number"),
        ("gradient_checkpointing: maybe", "must be true or false"),
        ("method_options: 3", "must be a mapping"),
        ("- a", "must hold settings"),
        ("a: [", "line 2: not valid YAML"),
    ],
)
def test_bad_yaml(tmp_path, text, message):
    path = tmp_path / "a.yaml"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError, match=message):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot read the config"):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": None}, "model is missing"),
        ({"epsilon": None}, "epsilon is missing"),
        ({"epsilon": 0.0}, "epsilon is .*: it must be greater than 0"),
        ({"epsilon": math.nan}, "epsilon is .*: it must be greater than 0"),
        ({"delta": 1.0}, "delta is 1.0: it must be greater than 0 and below 1"),
        ({"peft": "loar"}, "peft is 'loar': it must be one of full, lora"),
        ({"epochs": 0}, "epochs is 0: it must be greater than 0"),
        ({"warmup": 1.0}, "warmup is 1.0: it must be at least 0 and below 1"),
        ({"task": "classification"}, "labels must list"),
        ({"task": "classification", "labels": ["a", "a", "b"]}, "a label twice"),
        ({"task": "classification", "labels": ["a", "b"], "prompt_column": "x"}, "belongs to causal-lm"),
        ({"labels": ["a", "b"]}, "belongs to classification"),
        ({"prompt_column": "x"}, "go together"),
        ({"prompt_column": "x", "target_column": "y", "text_column": "z"}, "not both"),
    ],
)
def test_bad_settings(config, settings, message):
    with pytest.raises(ConfigError, match=message):
        with_settings(config, **settings).check()


def test_examples_of_the_repository_are_valid():
    for path in Path(__file__).parent.parent.glob("examples/*.yaml"):
        needed = {"model": "m", "train": "t", "eval": "e", "output": "o", "epsilon": 8}
        config = load_config(path, needed)
        config.epsilon = None if config.method == "sap" else 8.0
        config.check()
        assert not set(needed) & set(yaml.safe_load(path.read_text()))
