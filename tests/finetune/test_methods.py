"""Central methods by their options."""

import json
import math
from dataclasses import replace

import pytest
import torch

from fastdp.accounting import verify
from fastdp.finetune import finetune, run
from tests.finetune.runs import RAPFT, classify, stop_after
from tests.test_cli import told

# Every record is sampled: of 48, a fiftieth would often be none.
PAPER = {"mode": "paper", "source": {"kind": "private", "sample_rate": 1.0}}


@pytest.mark.parametrize(
    ("peft_kind", "method", "options", "kinds"),
    [
        ("lora", "rapft", {**RAPFT, "source": {"kind": "noisy", "noise_multiplier": 4.0, "sample_rate": 0.2}}, 2),
        ("bitfit", "rapft", {**RAPFT, "source": {"kind": "public", "data": "PUBLIC", "examples": 6}}, 1),
        (
            "lora",
            "rapft",
            {
                "allocation": "axes",
                "source": {"kind": "gradients", "data": "PUBLIC", "examples": 6, "at_once": 3},
                "map_after": 1,
                "map_every": 2,
            },
            1,
        ),
        ("full", "rapft", {**PAPER, "propagation": {"rule": "alpha_beta"}}, 1),
        ("full", "frost", {"unfreezing_ratio": 0.5, "selection_steps": 2, "selection_rate": 0.2}, 2),
    ],
)
def test_methods_by_their_options(config, files, tmp_path, peft_kind, method, options, kinds):
    source = options.get("source", {})
    if source.get("data") == "PUBLIC":
        options = {**options, "source": {**source, "data": str(files / "public.jsonl")}}
    result = finetune(replace(config, peft=peft_kind, method=method, method_options=options))
    assert result.steps == 3
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


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("frost", {"unfreezing_ratio": 1e-9}, "smallest"),
        ("ewft", {"autoencoder": None, "layer": 7}, "layer"),
        ("ewft", {"autoencoder": [4], "public": "missing.jsonl"}, "missing.jsonl"),
    ],
)
def test_a_method_that_does_not_fit_the_model_leaves_nothing_behind(config, method, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        finetune(replace(config, method=method, method_options=options))
    assert not list((tmp_path / "run").glob("*"))


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
    assert told("verify", output)
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
        classify(zeroth, files, user_column="label", max_examples_per_user=2, batch_size=1, delta=0.5, large_delta=True)
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
