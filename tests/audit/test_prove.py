"""Replayed neighbours: what a sound run moves, what a fault moves, and what the command says of either."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import fastdp
from fastdp.audit.prove import extremes, prove
from fastdp.cli import app
from fastdp.methods import rapft
from fastdp.private.prove import ROUNDING, Evidence, Trial
from tests.engine.runs import Classifier, collate, examples, logical_step, start
from tests.finetune.conftest import files, model_folder  # noqa: F401 - fixtures


def loader(**options):
    return DataLoader(examples(12), batch_size=4, **{"collate_fn": collate, **options})


def caught(attempt, refusal):
    """Whether a fault was found by the replay, or refused before it, in words that fit."""
    try:
        return not attempt()
    except (ValueError, RuntimeError) as error:
        return refusal in str(error)


class Leaking(Classifier):
    """Keeps a running mean of its inputs in a buffer, through storage whose version nobody counts."""

    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def logits(self, x):
        if self.training:
            self.mean.data.lerp_(x.detach().mean(0), 0.1)
        return super().logits(x)


@pytest.mark.parametrize("method", [fastdp.DPSGD(max_grad_norm=0.3), fastdp.DPSGD(0.3, groups="per_layer")])
def test_a_sound_run_moves_by_its_bound(method):
    model = Classifier()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evidence = prove(model, loader(), method=method)
    assert evidence.holds, evidence
    assert evidence.worst is not None
    assert evidence.worst.moved is not None
    assert evidence.worst.moved > 0.5, "a record that is clipped moves the release by nearly all of its bound"
    assert {"again", "remove", "replace", "add", "alone"} == {trial.kind for trial in evidence.trials}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_run_is_proved_as_it_stands_and_goes_on():
    private = start(Classifier(), loader(), method=fastdp.DPSGD(0.3), noise_multiplier=1.0, target_delta=1e-5)
    spent = private.epsilon()
    assert private.prove()
    assert private.epsilon() == spent
    assert private.steps_done == 0
    logical_step(private)
    after = {name: tensor.clone() for name, tensor in private.model.state_dict().items()}
    assert private.prove()
    assert all(torch.equal(after[name], tensor) for name, tensor in private.model.state_dict().items())
    logical_step(private)
    assert private.steps_done == 2
    with pytest.raises(ValueError, match="claims nothing"):
        start(Classifier(), loader(), method=fastdp.NonPrivate()).prove()


def test_users_are_proved_with_all_their_rows():
    users = [index // 2 for index in range(12)]
    private = start(Classifier(), loader(), method=fastdp.DPSGD(0.3), user_ids=users, max_examples_per_user=2)
    assert private.prove()


def test_a_prepared_run_is_proved_with_what_it_was_prepared_with():
    public = [collate(examples(8))]
    options = {"method": fastdp.RapFT(rapft.PublicMap(public)), "noise_multiplier": 1.0, "target_delta": 1e-5}
    private = start(Classifier(), loader(), **options)
    logical_step(private)
    assert private.outcome
    evidence = private.prove()
    assert evidence, evidence


def test_a_bound_that_is_not_kept_is_found(monkeypatch):
    from fastdp.engine.clip.policy import Policy

    clipped = Policy.scales
    monkeypatch.setattr(Policy, "scales", lambda self, *args, **kwargs: 1.5 * clipped(self, *args, **kwargs))
    evidence = prove(Classifier(), loader(), method=fastdp.DPSGD(max_grad_norm=0.3))
    assert not evidence
    assert evidence.worst is not None
    assert evidence.worst.moved == pytest.approx(1.5, rel=1e-3)


def test_what_leaves_in_a_buffer_is_found_or_refused():
    assert caught(lambda: prove(Leaking(), loader()), "mean")


def test_a_collator_that_remembers_is_found_or_refused():
    last = []

    def remembering(items):
        batch = collate(items)
        if last:
            batch["x"] = batch["x"] + last[-1]
        last.append(batch["x"].mean(0))
        return batch

    assert caught(lambda: prove(Classifier(), loader(collate_fn=remembering), method=fastdp.DPSGD(0.3)), "collat")


def test_a_user_s_own_loss_is_replayed():
    class Scores(Classifier):
        def forward(self, x, labels=None):
            return self.logits(x)

    def contrast(model, batch):
        scores = model(batch["x"])
        return nn.functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)))

    def own(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])

    options = {"loss_reduction": "mean", "method": fastdp.DPSGD(0.05)}
    assert prove(Scores(), loader(), loss=own, **options)
    assert caught(lambda: prove(Scores(), loader(), loss=contrast, **options), "loss")


def test_nothing_released_is_no_evidence():
    assert not Evidence((Trial("add", "x", None, "no"),)).holds
    assert not Evidence((Trial("add", "x", 0.0),)).holds
    assert Evidence((Trial("add", "x", 1.0),)).holds
    assert not Evidence((Trial("add", "x", 1 + 2 * ROUNDING),)).holds
    with pytest.raises(ValueError, match="at least 3"):
        prove(Classifier(), DataLoader(examples(2), collate_fn=collate))


def test_extremes_are_what_they_say():
    tokens = dict(extremes({"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, 12))
    assert tokens["a long record"]["labels"] == [5, 6, 7] * 4
    assert tokens["an empty record"] == {"input_ids": [], "labels": []}
    assert tokens["a record of one token again and again"]["input_ids"] == [5, 5, 5]
    assert tokens["a record without labels"] == {"input_ids": [5, 6, 7], "labels": [-100] * 3}
    assert tokens["a record of padding alone"] == {"input_ids": [0] * 3, "labels": [-100] * 3}
    numbers = dict(extremes({"x": torch.ones(4, 2), "labels": 1}, 12))
    assert float(numbers["a record a million times larger"]["x"].sum()) == 8e6
    assert numbers["a record that is not a number"]["x"].isnan().all()
    assert numbers["a record that is not a number"]["labels"] == 1
    assert not any("token" in what for what in numbers if what != "a record whose tokens cancel")
    texts = dict(extremes(("two words", 0), 12))
    assert texts["an empty text"] == ("", 0)
    assert len(texts["a long text"][0]) > 90


def proved_by_command(folder, *arguments):
    result = CliRunner().invoke(
        app, ["prove", *arguments, "--json", str(folder / "trials.json")], env={"COLUMNS": "200", "NO_COLOR": "1"}
    )
    assert result.exit_code == 0, result.output
    assert re.search(r"moved a release by at most [01]\.\d{4} of its bound: within the bound\.", result.output)
    assert ".weight" not in result.output, "nor a name of a parameter"
    assert "Error:" not in result.output, "a passing table holds no raw error"
    written = json.loads((folder / "trials.json").read_text())
    assert written["holds"]
    assert {trial["kind"] for trial in written["trials"]} >= {"add", "alone", "remove"}


def test_the_command_proves_a_model_in_a_folder(model_folder, files, tmp_path):  # noqa: F811
    proved_by_command(tmp_path, str(model_folder), "--data", str(files / "text.jsonl"), "--max-length", "12")


@pytest.mark.slow
def test_the_command_proves_the_quickstart_s_model(tmp_path):
    """As in the README, and within 30 seconds of a processor."""
    begun = time.process_time()
    proved_by_command(tmp_path, "quickstart")
    assert time.process_time() - begun < 30


def test_the_command_refuses_what_is_no_model(tmp_path):
    result = CliRunner().invoke(app, ["prove", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert "no folder" in result.output


class Silent(fastdp.DPSGD):
    """States no noise for what it clips."""

    def policy(self, *args, **kwargs):
        stated = super().policy(*args, **kwargs)
        return replace(stated, stds=(0.0,) * len(stated.stds))


def test_a_policy_without_noise_holds_no_record():
    worst = prove(Classifier(), loader(), method=Silent(max_grad_norm=0.3)).worst
    assert worst is not None
    assert worst.moved == math.inf
