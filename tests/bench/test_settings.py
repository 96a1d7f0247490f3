"""Rules are found again in runs that follow them, and a suggestion that is worse than the bar is told by the exit code."""

import json
import math
import sys
from pathlib import Path

import pytest
from fastdp.bench import settings

from fastdp.finetune import plan

STEPS = {16: 72, 64: 18, 192: 6}


def followed(name, chosen):
    """A run's row under known rules, whatever the noise: a rate of .004 and 18 steps are best."""
    steps, noise = STEPS[chosen["batch_size"]], 4 / chosen["epsilon"] ** 0.5
    row = {"data": name, **chosen, "steps": steps, "noise_multiplier": noise, "trained_parameters": 4096}
    off = math.log(chosen["learning_rate"] / 0.004) ** 2
    off += abs(math.log(steps / 18)) + math.log(chosen["max_grad_norm"]) ** 2
    off += math.log(chosen["lora_r"] / 32) ** 2
    return row | ({"accuracy": 1 - 0.01 * math.exp(off / 30)} if name == "sst2" else {"perplexity": math.exp(3 + off)})


def test_planted_rules_are_found():
    rows = [followed(name, chosen) for name, chosen in settings.grid()]
    assert len(rows) == 64
    found = settings.fit(rows)
    assert found["rate"] == pytest.approx(0.004, rel=0.1)
    assert found["power"] == 0.0
    assert (found["least_steps"], found["bound"], found["rank"]) == (18, 1.0, 32)


@pytest.mark.parametrize(("ratio", "code"), [(1.09, 0), (1.11, 1)])
def test_a_suggestion_beyond_the_bar_is_told(ratio, code, tmp_path, monkeypatch, capsys):
    ours = {**settings.MIDDLE, "lora_r": 32, "epsilon": 8.0}
    rows = [{"data": "wikitext2", **chosen, "perplexity": 100.0} for _, chosen in settings.grid("wikitext2")]
    assert len(rows) == 12
    rows.append({"data": "wikitext2", **ours, "suggested": True, "perplexity": 100 * ratio})
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"figures": rows}))
    monkeypatch.setattr(settings, "suggested", lambda *_: ours)
    arguments = ["--data", str(tmp_path), "--model", "none", "--only", "wikitext2", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["settings", *arguments])
    with pytest.raises(SystemExit) as ended:
        settings.main()
    assert ended.value.code == code
    assert f"suggested: {ratio:.3f} of the best of 12" in capsys.readouterr().out


def committed(name):
    return json.loads((Path(settings.__file__).parent / "results" / name).read_text())["figures"]


def test_the_rules_are_those_that_fit_the_committed_runs():
    rows = committed("settings.json")
    assert len(rows) >= 60
    found = settings.fit(rows)
    assert (found["rate"], found["power"]) == (plan.RATE, plan.RATE_POWER)
    assert (found["least_steps"], found["bound"]) == (plan.LEAST_STEPS, plan.BOUND)
    assert found["rank"] == plan.RANK
