"""A whole run on a tiny model: what it writes, and what it refuses."""

import json
import math
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers

import fastdp
from fastdp.accounting import dpsgd, epsilon
from fastdp.finetune import ConfigError, finetune, load_config, run
from fastdp.quickstart.corpus import private_records
from fastdp.tables import DataError, read_rows
from tests.cases import cases
from tests.finetune.conftest import EXAMPLES
from tests.finetune.runs import RAPFT, Stopped

AXES = {"allocation": "axes"}


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("name", ["adapter", "model", "card.json", "checkpoint.pt"])
def test_what_others_keep_in_the_output_is_not_overwritten(config, tmp_path, name):
    kept = tmp_path / "run" / name / "kept" if name in ("adapter", "model") else tmp_path / "run" / name
    kept.parent.mkdir(parents=True)
    kept.write_text("kept")
    with pytest.raises(ConfigError, match=f"holds {name}, which the run would overwrite: choose another output"):
        finetune(config)
    assert kept.read_text() == "kept"
    assert len(list((tmp_path / "run").rglob("*"))) == 1 + (kept.parent.name == name)


def test_lora_run_writes_everything_and_loads_in_plain_peft(config, model_folder, tmp_path, monkeypatch):
    seen = {}

    def remember(model, *args):
        seen["logits"] = logits(model, torch.arange(1, 13).reshape(2, 6))
        return original(model, *args)

    original = run.save_weights
    monkeypatch.setattr(run, "save_weights", remember)
    config = replace(config, noise_rounds=12)
    result = finetune(config)
    output = tmp_path / "run"
    card = json.loads((output / "card.json").read_text())
    assert card["noise_source"]["generator"] == "ChaCha12"
    assert any(f"units of {config.max_length:,} tokens" in sentence for sentence in card["remaining"])
    assert 'separator: "\\n"' in (output / "config.yaml").read_text().splitlines()
    assert {path.name for path in output.iterdir()} >= {
        *("adapter", "card.json", "card.md", "config.yaml", "metrics.jsonl", "result.json")
    }
    assert not (output / "checkpoint.pt").exists()
    for name in ("config.yaml", "metrics.jsonl", "result.json", "ledger.jsonl"):
        assert (output / name).stat().st_mode & 0o077 == 0, f"others of this machine may read {name}"
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


def test_micro_batches_are_recorded_by_default_where_a_run_may(config, tmp_path, monkeypatch):
    from fastdp.private import recorder

    recorded = []

    def no_recorder():
        recorded.append(None)
        raise RuntimeError("this is no GPU")

    monkeypatch.setattr(run, "_device", lambda config: torch.device("cpu"))
    monkeypatch.setattr("fastdp.builder.refuse_capture", lambda *args, **options: None)
    monkeypatch.setattr(recorder, "_cuda_recorder", no_recorder)
    # Micro-batches of one shape, so that one of each comes again.
    config = replace(config, shapes="public", eval=None)
    finetune(replace(config, capture=False, output=str(tmp_path / "eager")))
    assert not recorded
    with pytest.warns(UserWarning, match="run one operation at a time: this is no GPU"):
        finetune(config)
    assert recorded


def test_a_run_without_a_gpu_records_nothing(config, tmp_path):
    with pytest.raises(ConfigError, match="capture records CUDA graphs, and this run is on cpu: leave capture out"):
        finetune(replace(config, capture=True))
    assert not (tmp_path / "run").exists()


def test_micro_batches_of_public_shapes(config, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="the model takes 64: lower max_length to 63"):
        finetune(replace(config, shapes="public", max_length=64))
    seen = []
    original = fastdp.make_private

    def remember(*args, **options):
        seen.append(options["shapes"])
        return original(*args, **options)

    monkeypatch.setattr(run.fastdp, "make_private", remember)
    finetune(replace(config, shapes="public", epochs=1))
    assert seen == [[16, 32, config.max_length + 1]]
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert any("one unit changes no bit" in said for said in card["remaining"])


def test_without_privacy_the_same_path_learns(config):
    result = finetune(replace(config, peft="full", epsilon=math.inf, delta=0.5, epochs=4, learning_rate=0.01))
    assert math.isinf(result.epsilon)
    assert result.noise_multiplier == 0
    assert result.after.loss < result.before.loss - 0.3
    assert json.loads((Path(config.output) / "result.json").read_text())["epsilon"] == "inf"


@cases(
    ("method", "options", "words"),
    [
        ("rapft", {"irelevance_ratio": 0.7}, "no option 'irelevance_ratio'; did you mean irrelevance_ratio"),
        ("rapft", {}, r"give method_options such as \{source: \{kind: public, data: FILE\}\}"),
        ("rapft", {"source": {"kind": "public"}}, "needs data"),
        (
            "rapft",
            {"source": {"kind": "public", "data": "x", "examples": "many"}},
            "examples of source must be a whole number",
        ),
        ("rapft", {"source": {"kind": "gradients", "data": "x", "rows": 3}}, "at_once, not rows"),
        ("rapft", AXES | {"source": {"kind": "gradients", "data": "x", "at_once": 65}}, "between 1 and the 64"),
        ("rapft", {"source": {"kind": "nosy"}}, "choose one of public, gradients, noisy"),
        ("rapft", {"source": "noisy"}, "must be a mapping"),
        ("rapft", {"source": {"kind": "noisy", "noise_multiplier": 1.0}}, "sample_rate"),
        ("frost", {"unfreezing_ratio": 2.0}, "unfreezing_ratio is 2.0"),
        ("frost", {"gamma": 1}, "has no option 'gamma'"),
        ("dpsgd", {"groups": "each"}, "per_layer"),
        ("ewft", {}, "must learn from public text"),
        ("ewft", {"autoencoder": None, "noise": "brown"}, "choose one of release_once"),
        ("ewft", {"autoencoder": None, "depth": 7}, "no option 'depth'"),
        ("ewft", {"autoencoder": None, "max_norm": -1.0}, "max_norm is -1.0"),
        ("ewft", {"rehearsal": {"public": "x", "examples": "many"}}, "examples .*whole number"),
        ("sap with epsilon", {"eta": 1.0}, "leave epsilon out"),
        ("sap", {"eta": 1.0, "teta": 1}, "no option 'teta'; did you mean eta"),
        ("sap", {}, "needs eta"),
        ("sap", {"eta": -1.0}, "eta is -1.0"),
        ("sap", {"epsilon": 1.0}, "quotient"),
        ("selective", {}, "needs epsilon, of a private token"),
        ("selective", {"epsilon": 1, "mechanism": "tiped"}, "mechanism is 'tiped'"),
    ],
)
def test_options_are_refused_before_anything_is_read_loaded_or_made(
    config, tmp_path, monkeypatch, method, options, words
):
    for name in ("read_rows", "check_model_name", "load_tokenizer", "load_trained"):
        monkeypatch.setattr(run, name, lambda *_, name=name: pytest.fail(f"{name} came before the refusal"))
    epsilon = None if method in ("sap", "selective") else 8.0
    config = replace(config, method=method.split()[0], epsilon=epsilon, method_options=options)
    with pytest.raises(ConfigError, match=words):
        finetune(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("delta", "refused"), [(1 / 48, True), (0.5, True), (1 / 49, False)])
def test_a_delta_that_would_publish_whole_records_is_refused_unless_confirmed(config, monkeypatch, delta, refused):
    def loading(*_):
        raise Stopped

    monkeypatch.setattr(run, "load_trained", loading)
    settings = replace(config, delta=delta)
    with pytest.raises(ConfigError if refused else Stopped):
        finetune(settings)
    with pytest.raises(Stopped):
        finetune(replace(settings, large_delta=True))


def test_an_output_that_cannot_be_written_is_refused_in_words(config, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="file is a file and not a folder"):
            finetune(replace(config, output=str(output)))
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    with pytest.raises(ConfigError, match="nowhere is a file and not a folder"):
        finetune(replace(config, output=str(tmp_path / "nowhere")))
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match="nothing can be written to"):
        finetune(config)


@pytest.fixture
def notes(config, tmp_path):
    """Settings of a run on four notes of each of twelve patients, one of whom wrote twice as many."""
    path = tmp_path / "notes.jsonl"
    patients = [number // 4 for number in range(44)] + [10] * 4
    rows = zip(private_records(48, seed=1), patients)
    path.write_text("".join(json.dumps({"text": text, "patient": patient}) + "\n" for text, patient in rows))
    return replace(
        config, train=str(path), eval=None, user_column="patient", max_examples_per_user=2, batch_size=4, delta=1e-2
    )


def test_the_example_s_card_and_account_are_of_people(model_folder, functions, tmp_path):
    settings = {"model": str(model_folder), "train": str(functions / "functions.csv"), "epsilon": 8, "delta": 1e-2}
    sizes = {"max_length": 48, "epochs": 1, "batch_size": 4, "samples": 0, "output": str(tmp_path / "run")}
    result = finetune(load_config(EXAMPLES / "people.yaml", settings | sizes))
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert card["unit"] == "user (at most 4 examples)"
    people = len(set(read_rows(functions / "functions.csv", "latin-1").column("module", "")))
    assert card["dataset_size"] == people > 8
    assert load_config(tmp_path / "run" / "config.yaml").labels == ["no", "yes"]
    event = dpsgd(result.noise_multiplier, 4 / people, result.steps)
    assert result.epsilon == pytest.approx(epsilon(event, 1e-2), rel=1e-6)
    assert result.epsilon <= 8


@pytest.mark.parametrize(("name", "train"), [("alpaca", "alpaca-*.json"), ("columns", "functions.parquet")])
def test_an_example_of_several_prompt_columns_trains_on_its_files(model_folder, functions, tmp_path, name, train):
    settings = {"model": str(model_folder), "train": str(functions / train), "epsilon": 8, "delta": 1e-3}
    sizes = {"max_length": 48, "epochs": 1, "batch_size": 16, "samples": 0, "output": str(tmp_path / "run")}
    finetune(load_config(EXAMPLES / f"{name}.yaml", settings | sizes))
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    table = read_rows(functions / train, "utf-16" if name == "alpaca" else None)
    assert card["dataset_size"] == len(table) == len(read_rows(functions / "messages.jsonl"))
    assert name == "alpaca" or set(table.column("kind", "prompt_column")) == {"class", "function"}


def test_a_method_with_two_blocks_takes_people(notes, files):
    source = {"kind": "public", "data": str(files / "public.jsonl"), "examples": 6}
    finetune(replace(notes, method="rapft", method_options={**RAPFT, "source": source}))


@pytest.mark.parametrize(
    ("changes", "row", "error", "words"),
    [
        (
            {"user_column": "doctor"},
            None,
            DataError,
            r"no column 'doctor' \(user_column\); its columns are text, patient",
        ),
        ({"batch_size": 12}, None, ConfigError, "batch_size 12 exceeds the 11 training people"),
        ({"delta": 0.1}, None, ConfigError, "delta 0.1 is not below 1 / 11 people"),
        ({}, {"text": "a", "patient": None}, DataError, r"line 49: column 'patient' \(user_column\) holds nothing"),
        ({}, {"text": "a", "patient": ""}, DataError, r"line 49: column 'patient' \(user_column\) names nobody"),
    ],
)
def test_people_who_do_not_fit_are_refused_before_anything_is_spent(notes, tmp_path, changes, row, error, words):
    if row is not None:
        with open(notes.train, "a") as file:
            file.write(json.dumps(row) + "\n")
    with pytest.raises(error, match=words):
        finetune(replace(notes, **changes))
    assert not (tmp_path / "run").exists()
