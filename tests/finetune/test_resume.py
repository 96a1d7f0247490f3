"""A run that was stopped goes on with what it had spent, and forgets nothing of it."""

import json
import math
import random
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves

from fastdp import accounting
from fastdp.accounting import verify
from fastdp.finetune import ConfigError, finetune
from fastdp.finetune.folder import keep_metrics, read_checkpoint
from tests.finetune.runs import classify, stop_after


def test_resume_keeps_spent_budget_and_ends_within_the_target(config, tmp_path):
    config = replace(config, epochs=4)
    stop_after(7, config)
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
    stop_after(1, config)
    result = finetune(config, resume=True)
    assert result.steps <= 2
    assert result.epsilon <= 8


def test_budget_spent_without_a_checkpoint_is_not_passed_off_as_a_run(config, tmp_path):
    config = replace(config, checkpoint_every=100)
    stop_after(3, config)
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
    stop_after(3, replace(config, epochs=4))
    other = replace(config, epochs=4, lora_r=3, output=str(tmp_path / "other"))
    stop_after(3, other)
    shutil.copy(tmp_path / "run" / "checkpoint.pt", tmp_path / "other" / "checkpoint.pt")
    with pytest.raises(ConfigError, match="of another model"):
        finetune(other, resume=True)
    assert (tmp_path / "other" / "ledger.jsonl").exists(), "a refused resume must not forget what was spent"


def test_a_resumed_run_keeps_the_matrices_that_were_drawn_and_not_trained(config, tmp_path, monkeypatch):
    """Another build of torch draws other numbers from the seed: those of the checkpoint count, and the adapter holds them."""
    from fastdp.finetune import models

    config = replace(config, lora_fixed=True, target_modules=["c_attn"])
    stop_after(3, config)
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


#: Lines that no run writes: other values, other types, parts of a line, and a step that comes later.
BAD_LINES = [
    "{}",
    '{"loss": 1}',
    "[1]",
    "null",
    '{"step": "3", "unprotected": {}}',
    '{"step": 1, "st',
    "\x00",
    '{"step": 1}',
]


def test_bad_lines_of_metrics_are_left_out(config, tmp_path):
    config = replace(config, epochs=2)
    stop_after(5, config)
    path = tmp_path / "run" / "metrics.jsonl"
    rows = path.read_text().splitlines()
    for line in BAD_LINES:
        path.write_text("\n".join([rows[0], line, *rows[1:]]) + "\n")
        keep_metrics(tmp_path / "run", 4)
        assert path.read_text().splitlines() == rows[:4], line
    path.write_bytes("\n".join([rows[0], *BAD_LINES, *rows[1:]]).encode() + b"\n\xff\xfe\n")
    result = finetune(config, resume=True)
    kept = [json.loads(row)["step"] for row in path.read_text().splitlines()]
    assert kept == list(range(1, result.steps + 1))


def test_no_flipped_bit_of_a_checkpoint_is_resumed(config, tmp_path):
    stop_after(3, config)
    run = tmp_path / "run"
    whole = (run / "checkpoint.pt").read_bytes()
    sound = torch.load(run / "checkpoint.pt", weights_only=True)
    drawn, refused = random.Random(0), []
    for _ in range(300):
        place = drawn.randrange(len(whole))
        (run / "checkpoint.pt").write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << drawn.randrange(8)]) + whole[place + 1 :]
        )
        try:
            found = read_checkpoint(run)
        except ConfigError as error:
            refused.append(str(error))
            continue
        pairs = list(zip(tree_leaves(found), tree_leaves(sound), strict=True))
        assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)
    assert len(refused) > 150
    assert all("is damaged: remove it" in said for said in refused)


def test_other_data_of_the_same_length_are_refused(config, files, tmp_path):
    config = classify(config, files, epochs=2)
    train = tmp_path / "own.tsv"
    kept = (files / "labels.tsv").read_text()
    train.write_text(kept)
    config = replace(config, train=str(train))
    stop_after(3, config)
    ledger = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    for changed in (kept.replace("daily", "dayly"), kept.replace("\toften", "\tseldom", 1)):
        assert changed != kept
        assert len(changed.splitlines()) == len(kept.splitlines())
        train.write_text(changed)
        with pytest.raises(ConfigError, match="holds other examples than the run began with: put them back"):
            finetune(config, resume=True)
        assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == ledger
    train.write_text(kept)
    assert finetune(config, resume=True).epsilon <= 8


def cut_ledger(run):
    """To the records that the checkpoint knows."""
    head = torch.load(run / "checkpoint.pt", weights_only=True)["private"]["ledger_head"]
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    last = next(number for number, line in enumerate(lines) if head.encode() in line)
    (run / "ledger.jsonl").write_bytes(b"".join(lines[: last + 1]))


@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_ledger_cut_back_without_a_memory_counts_what_may_have_been_released(
    config, tmp_path, monkeypatch, checkpointed
):
    config = replace(config, epochs=4, checkpoint_every=4)
    stop_after(7 if checkpointed else 3, config)
    made = accounting.Ledger.read(tmp_path / "run" / "ledger.jsonl").spent_steps
    if checkpointed:
        cut_ledger(tmp_path / "run")
    else:
        lines = (tmp_path / "run" / "ledger.jsonl").read_bytes().splitlines(keepends=True)
        (tmp_path / "run" / "ledger.jsonl").write_bytes(b"".join(lines[:2]))
    assert accounting.Ledger.read(tmp_path / "run" / "ledger.jsonl").spent_steps < made
    with pytest.raises(accounting.LedgerError, match="cut back"):
        finetune(config, resume=True)
    monkeypatch.setenv("FASTDP_STATE", str(tmp_path / "elsewhere"))
    result = finetune(config, resume=True)
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert card["steps"]["spent"] == 12
    # Those after the last checkpoint were lost, and are paid for.
    assert result.steps <= 12 - 4
    assert any("memory of the run is lost" in note and "steps count as spent" in note for note in result.notes)
    assert verify(tmp_path / "run" / "card.json", ledger=tmp_path / "run" / "ledger.jsonl").guarantee


def test_a_stopped_run_of_a_local_method_leaves_a_record_of_what_was_released(config, files, tmp_path):
    options = {"layer": 1, "autoencoder": None, "noise": "release_once"}
    settings = classify(config, files, method="ewft", method_options=options, epochs=2)
    stop_after(2, settings)
    path = tmp_path / "run" / "releases" / "ledger.jsonl"
    assert accounting.Ledger.read(path).spent_steps == 1
    with pytest.raises(ConfigError, match="a second time, at the full price again"):
        finetune(settings, resume=True)
    with pytest.raises(ConfigError, match="already holds a run"):
        finetune(settings)


#: Learning rates over the peak, of updates counted from 0 to T.
FORMS = {
    "linear": lambda step, total: (total - step) / total,
    "cosine": lambda step, total: math.cos(math.pi * step / total / 2) ** 2,
}


def rates(folder):
    """The learning rate after each update, by its number."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["learning_rate"] for row in rows}


def expected(schedule, warmup, steps, total, peak):
    """What a schedule says, written out: a rise over the first steps, times the form."""
    rise = [min(1.0, (step + 1) / (warmup * total)) if warmup else 1.0 for step in range(total + 1)]
    return {step: pytest.approx(peak * rise[step] * FORMS[schedule](step, total), abs=1e-12) for step in steps}


@pytest.mark.parametrize(("schedule", "warmup"), [("linear", 0.5), ("cosine", 0.0)])
def test_a_run_follows_its_schedule_and_so_does_one_that_was_stopped(config, tmp_path, schedule, warmup):
    config = replace(config, epochs=2, schedule=schedule, warmup=warmup, eval=None, learning_rate=2e-3)
    total = 6
    stop_after(4, config)
    before = rates(tmp_path / "run")
    assert before == expected(schedule, warmup, range(1, 5), total, 2e-3)
    if schedule == "cosine":
        return
    result = finetune(config, resume=True)
    after = rates(tmp_path / "run")
    # The checkpoint is of two updates: two more were lost with the process, and those after it are new.
    assert max(after) == result.steps > 2
    assert after == expected(schedule, warmup, range(1, result.steps + 1), total, 2e-3)
