"""A run that was stopped goes on with what it had spent, and forgets nothing of it."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from fastdp import accounting
from fastdp.finetune import ConfigError, Reporter, finetune
from tests.finetune.runs import StopAfter, classify


def test_resume_keeps_spent_budget_and_ends_within_the_target(config, tmp_path):
    config = replace(config, epochs=4)
    with pytest.raises(SystemExit):
        finetune(config, reporter=StopAfter(7))
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    with pytest.raises(ConfigError, match="already holds a run"):
        finetune(config)
    with pytest.raises(ConfigError, match="these differ: learning_rate"):
        finetune(replace(config, learning_rate=1.0), resume=True)
    result = finetune(config, resume=True)
    assert result.epsilon <= 8
    assert result.before is not None
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, result.steps + 1))
    # Seven steps were released and six of them kept: the budget of twelve holds five more.
    assert 6 < result.steps <= 11
    with pytest.raises(ConfigError, match="is finished"):
        finetune(config, resume=True)


def test_resume_before_the_first_checkpoint_starts_anew_but_remembers(config, tmp_path):
    with pytest.raises(SystemExit):
        finetune(config, reporter=StopAfter(1))
    result = finetune(config, resume=True)
    assert result.steps <= 2
    assert result.epsilon <= 8


def test_budget_spent_without_a_checkpoint_is_not_passed_off_as_a_run(config, tmp_path):
    config = replace(config, checkpoint_every=100)
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


def test_a_checkpoint_of_another_model_is_refused(config, tmp_path):
    with pytest.raises(SystemExit):
        finetune(replace(config, epochs=4), reporter=StopAfter(3))
    other = replace(config, epochs=4, lora_r=3, output=str(tmp_path / "other"))
    with pytest.raises(SystemExit):
        finetune(other, reporter=StopAfter(3))
    shutil.copy(tmp_path / "run" / "checkpoint.pt", tmp_path / "other" / "checkpoint.pt")
    with pytest.raises(ConfigError, match="of another model"):
        finetune(other, resume=True)
    assert (tmp_path / "other" / "ledger.jsonl").exists(), "a refused resume must not forget what was spent"


def test_a_resumed_run_keeps_the_matrices_that_were_drawn_and_not_trained(config, tmp_path, monkeypatch):
    """Another build of torch draws other numbers from the seed: those of the checkpoint count, and the adapter holds them."""
    from fastdp.finetune import models

    config = replace(config, lora_fixed=True, target_modules=["c_attn"])
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


def load_base(config):
    return transformers.AutoModelForCausalLM.from_pretrained(config.model)


def test_a_stopped_run_resumes_with_the_partitions_it_had_chosen(config, tmp_path):
    options = {"unfreezing_ratio": 0.5, "selection_steps": 2, "selection_rate": 0.2}
    settings = replace(config, peft="full", method="frost", method_options=options, epochs=4)
    with pytest.raises(SystemExit):
        finetune(settings, reporter=StopAfter(5))
    [kept] = (tmp_path / "run").glob("preparation-*")
    before = kept.read_bytes()
    result = finetune(settings, resume=True)
    assert kept.read_bytes() == before
    assert 0 < result.epsilon <= 8
    assert result.trained_parameters < sum(p.numel() for p in load_base(config).parameters()) / 2


class Failing(Reporter):
    """Refuses as the evaluation before training begins."""

    def phase(self, text):
        if text == "evaluating before training":
            raise ConfigError("stopped early")


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
        finetune(replace(settings, output=str(tmp_path / "other")), reporter=Failing())
    assert not (tmp_path / "other" / "releases").exists()
