"""Central methods by their options."""

import json
import math
from dataclasses import replace

import pytest

from fastdp.finetune import finetune
from tests.finetune.runs import RAPFT

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
