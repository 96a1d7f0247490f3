"""`fastdp finetune` with ``method: dpzo``: tuning without a backward pass, from a YAML file or flags."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from fastdp.accounting import verify
from fastdp.cli import app
from fastdp.finetune import finetune, run
from tests.finetune.runs import classify, stop_after


@pytest.fixture
def zeroth(config):
    return replace(config, method="dpzo", shapes="public", learning_rate=1e-3)


@pytest.mark.parametrize("peft", ["full", "dora", "prompt"])
def test_it_trains_what_peft_says_and_its_card_holds(zeroth, moved, peft, tmp_path, monkeypatch):
    backward, steps = torch.Tensor.backward, []

    def watched(loss, *args, **kwargs):
        backward(loss, *args, **kwargs)
        steps.append([p for p in made.model.parameters() if p.grad is not None])

    monkeypatch.setattr(torch.Tensor, "backward", watched)
    made, make = None, run.FinetuneRun.make_private

    def kept(self, resume):
        nonlocal made
        made = self
        make(self, resume)

    monkeypatch.setattr(run.FinetuneRun, "make_private", kept)
    result = finetune(replace(zeroth, peft=peft, method_options={"max_slope": 0.5}))
    output = tmp_path / "run"
    # The only gradient is that of one number, in the rehearsal too, which comes before.
    assert steps
    assert all(p.numel() == 1 for own in steps for p in own)
    card = json.loads((output / "card.json").read_text())
    assert card["mechanism"] == {"name": "DP-ZO", "max_slope": 0.5, "smoothing": 1e-3, "seed": 0}
    assert card["model"]["trained_parameters"] == result.trained_parameters > 90
    assert 0 < result.epsilon <= 8
    assert moved()
    assert CliRunner().invoke(app, ["verify", str(output)]).exit_code == 0
    found = verify(output / "card.json", ledger=output / "ledger.jsonl", weights=output)
    assert found.guarantee
    assert found.holds


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shapes": "own"}, "one record's shape may move what others add by many bounds: set shapes: public"),
        ({"max_grad_norm": 0.5}, "set max_slope in method_options"),
        ({"weight_decay": 0.1}, "weight_decay has no effect"),
        ({"gradient_checkpointing": True}, "which dpzo does not make"),
        ({"capture": True}, "which dpzo does not make"),
        ({"method_options": {"max_slop": 1.0}}, "DPZO has no option 'max_slop'; did you mean max_slope"),
        ({"method_options": {"smoothing": 0.0}}, "smoothing"),
        # What reads weights outside of the module that holds them.
        ({"peft": "ia3"}, "is read outside the forward"),
    ],
)
def test_what_does_not_go_with_it_is_refused_and_nothing_is_spent(zeroth, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        finetune(replace(zeroth, **settings))
    assert not (tmp_path / "run").exists()


def test_it_classifies_and_people_may_be_protected(zeroth, files, tmp_path):
    result = finetune(
        classify(zeroth, files, user_column="label", max_examples_per_user=2, batch_size=1, large_delta=True)
    )
    assert result.before.accuracy is not None
    assert verify(tmp_path / "run" / "card.json").holds


def test_a_stopped_run_goes_on_with_the_weights_and_the_direction_of_its_checkpoint(zeroth, tmp_path):
    settings = replace(zeroth, epochs=4)
    stop_after(5, settings)
    result = finetune(settings, resume=True)
    assert result.epsilon <= 8
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    # Twelve steps are paid for; the fifth was lost.
    assert card["steps"]["spent"] == 12
    assert result.steps == 11
