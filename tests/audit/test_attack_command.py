"""`fastdp attack`: its figures, its file, and its refusals in one sentence."""

import dataclasses
import json
import re

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from typer.testing import CliRunner

from fastdp.cli import app
from fastdp.finetune import FinetuneConfig
from tests.accounting.test_card import card_of_run

runner = CliRunner()


def attack(folder, *arguments):
    words = ["attack", str(folder), *map(str, arguments)]
    return runner.invoke(app, words, env={"COLUMNS": "300", "NO_COLOR": "1"})


def figures(folder, tmp_path, *arguments):
    """What a command wrote."""
    result = attack(folder, *arguments, "--json", tmp_path / "out" / "figures.json")
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out" / "figures.json").read_text())["figures"]
    assert all(title in result.output for title in written)
    last = result.output.splitlines()[-1]
    assert re.fullmatch(r"(At|The) .*%.*\.", last), f"no verdict: {last}"
    assert not re.search("auc_std|tpr_at|top1|empirical_", result.output), "names of figures, not keys"
    return written


def test_membership_by_loss_and_by_likelihood_ratio(learned, tmp_path):
    folder = learned.folder
    data = ("--train", folder / "train.txt", "--held-out", folder / "held_out.txt")
    written = figures(folder / "after", tmp_path, *data, "--reference", folder / "before")
    assert written["membership by loss"]["auc"] == 1.0
    assert written["membership by likelihood ratio"]["auc"] == 1.0
    assert written["membership by loss"]["members"] == 6
    fewer = figures(folder / "before", tmp_path, *data, "--limit", 4)
    assert fewer["membership by loss"]["others"] == 4
    assert fewer["membership by loss"]["auc"] < 0.9


def test_extraction_reconstruction_and_inversion(learned, tmp_path):
    folder = learned.folder
    lists = ("--names", folder / "names.txt", "--decoys", folder / "decoys.txt")
    said = figures(
        folder / "after", tmp_path, "--kind", "extraction", *lists, "--base", folder / "before", "--samples", 16
    )
    assert said["extraction"]["recall"] >= 1 / 3
    assert said["extraction"]["precision"] >= 0.9
    filled = figures(
        folder / "after",
        tmp_path,
        "--kind",
        "reconstruction",
        *lists,
        "--train",
        folder / "train.txt",
        "--candidates",
        4,
    )
    assert filled["reconstruction"]["top1"] >= 5 / 6
    assert filled["reconstruction"]["chance"] == 0.25
    kind = ("--kind", "inversion", "--train", folder / "train.txt")
    clear = figures(folder / "after", tmp_path, *kind)["inversion"]
    assert clear["empirical_privacy"] == 0.0
    noised = figures(folder / "after", tmp_path, *kind, "--eta", 0.01)["inversion"]
    assert noised["empirical_privacy"] > 0.9
    deeper = figures(folder / "after", tmp_path, *kind, "--blocks", 1, "--limit", 1)["inversion"]
    assert deeper["recovered"] > 0.5


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_a_runs_folder_is_attacked_with_the_runs_own_settings(kind, learned, tmp_path):
    run, base = tmp_path / "run", learned.folder / "before"
    settings = FinetuneConfig(model=str(base), train="t", output=str(run), epsilon=8, max_length=40, text_column="note")
    run.mkdir()
    settings.save(run / "config.yaml")
    model = transformers.GPT2LMHeadModel.from_pretrained(base)
    if kind == "adapter":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    model.save_pretrained(run / kind)
    learned.tokenizer.save_pretrained(run / kind)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"id": i, "note": f"Patient {i} has gout."}) + "\n" for i in range(5)))
    written = figures(run, tmp_path, "--train", rows, "--held-out", rows)
    assert written["membership by loss"]["auc"] == 0.5
    data = ("--train", rows, "--held-out", rows)
    assert "no card beside the model bounds what others may find" in attack(run, *data).output
    card = card_of_run()
    card.save(run / "card.json")
    assert f"its card allows any attack {card['membership']['0.01']:.1%}." in attack(run, *data).output
    (run / "card.json").write_text(json.dumps({**card, "membership": "none"}))
    assert "its card bounds nothing: the card was altered" in attack(run, *data).output
    if kind == "adapter":
        save_file({"other": torch.ones(2)}, run / kind / "adapter_model.safetensors")
        assert 'does not fit its model: "Found missing adapter keys' in attack(run, *data).output
    settings = dataclasses.replace(settings, max_length=-1)
    settings.save(run / "config.yaml")
    assert "max_length is -1: it must be greater than 0" in attack(run, *data).output


def test_refusals_are_one_sentence(learned, tmp_path):
    folder, train = learned.folder, learned.folder / "train.txt"
    empty, run = tmp_path / "empty.txt", tmp_path / "run"
    empty.write_text("\n")
    run.mkdir()
    FinetuneConfig(model=str(folder / "before"), train="t", output=str(run), epsilon=8).save(run / "config.yaml")
    (tmp_path / "bare").mkdir()
    reconstruction = ("--kind", "reconstruction", "--train", train)
    for target, arguments, message in (
        (folder / "none", (), "there is no folder"),
        (tmp_path / "bare", (), "neither a run nor a model"),
        (run, (), "no weights yet"),
        (folder / "after", ("--train", train), "--held-out"),
        (folder / "after", ("--train", train, "--held-out", tmp_path / "no.txt"), "there is no file"),
        (folder / "after", ("--kind", "extraction"), "--names"),
        (folder / "after", ("--kind", "extraction", "--names", empty), "holds no names"),
        (folder / "after", ("--kind", "extraction", "--names", tmp_path / "no.txt"), "no such file"),
        (folder / "after", (*reconstruction, "--names", folder / "decoys.txt"), "holds a name"),
        (folder / "after", ("--kind", "inversion", "--train", train, "--eta", -1), "eta must be"),
        (folder / "after", ("--kind", "inversion", "--train", train, "--eta", 1, "--blocks", 1), "leave it out"),
        (folder / "after", ("--kind", "inversion", "--train", train, "--blocks", 7), "the model has 1 blocks"),
    ):
        result = attack(target, *arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
        assert message in result.stderr
        assert result.stderr.strip().count("\n") == 0


def test_a_classifier_can_be_asked_for_members_but_not_for_names(learned, tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "classifier"
    settings = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, n_positions=40, vocab_size=1536, num_labels=2, pad_token_id=0, bos_token_id=0
    )
    settings.id2label = {0: "calm", 1: "loud"}
    transformers.GPT2ForSequenceClassification(settings).save_pretrained(folder)
    learned.tokenizer.save_pretrained(folder)
    rows = tmp_path / "rows.csv"
    rows.write_text("text,mood\n" + "".join(f"noise {i},{('calm', 'loud')[i % 2]}\n" for i in range(8)))
    data = ("--train", rows, "--held-out", rows, "--label-column", "mood")
    assert figures(folder, tmp_path, *data)["membership by loss"]["auc"] == 0.5
    refused = attack(folder, "--kind", "extraction", "--names", learned.folder / "names.txt")
    assert "needs a causal-lm model" in refused.stderr
