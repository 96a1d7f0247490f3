"""A search over settings: one event pays for it, what it releases verifies, and its choice is audited."""

import dataclasses
import functools
import json
import math
import random
import re

import peft
import pytest
import transformers

from fastdp.accounting import Card, Ledger, epsilon, renyi, verify
from fastdp.accounting.card import digest
from fastdp.finetune import judges, tune as tuning
from fastdp.finetune.config import ConfigError
from fastdp.finetune.tune import best_of, tune
from fastdp.tables import DataError
from tests.cases import cases
from tests.finetune.runs import Stopped
from tests.test_cli import refused, told


@pytest.fixture(autouse=True, scope="module")
def moments():
    """The moments of equal events, most of a search's time, are computed once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renyi, "sampled_moment", functools.cache(renyi.sampled_moment))
        yield


def test_a_search_releases_the_best_trial_and_its_card(config, model_folder, tmp_path, monkeypatch):
    """Two trials, the first with a learning rate that ruins the model."""
    monkeypatch.setattr(renyi, "draw_trials", lambda *_: 2)
    rates = iter([{"learning_rate": 1e36}, {"learning_rate": 1e-3}])
    monkeypatch.setattr(tuning.secrets, "choice", lambda _: next(rates))
    monkeypatch.setattr(tuning, "LEAST_JUDGES", 5)
    monkeypatch.setattr(judges, "add_noise_", lambda total, multiplier, stream: total)
    config = dataclasses.replace(config, eval=None, batch_size=8)
    found = tune(config, {"learning_rate": [1e36, 1e-3]}, trials=3, held_out=0.5)
    output = tmp_path / "run"
    assert found.settings == {"learning_rate": 1e-3}
    assert 0 < found.score < 10
    assert found.epsilon <= 8
    card = Card.load(output / "card.json")
    result = verify(card, weights=output, ledger=output / "ledger.jsonl")
    assert result.guarantee, result.reason
    assert not any("adapter's config" in said for said in result.unchecked)
    assert "## Use" in (output / "adapter" / "README.md").read_text()
    assert result.recomputed == pytest.approx(found.epsilon)
    # What one trial costs is much less than what was paid.
    assert epsilon(card.claims[0].event.alternatives[0], 1e-3) < 0.7 * found.epsilon
    assert card["tuning"]["won"] == found.settings
    for name in card["tuning"]:
        forged = {**card, "tuning": {key: value for key, value in card["tuning"].items() if key != name}}
        assert f"tuning.{name} is missing" in verify({**forged, "digest": digest(forged)}).reason
    text = (output / "card.md").read_text()
    assert "best of a secret number" in text
    # Nothing else stays: neither trials nor what tells how many there were.
    assert {path.name for path in output.iterdir()} == {
        "adapter",
        "card.json",
        "card.md",
        "config.yaml",
        "ledger.jsonl",
    }
    assert Ledger.read(output / "ledger.jsonl").spent_steps == 1
    base = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    peft.PeftModel.from_pretrained(base, output / "adapter")
    with pytest.raises((ConfigError, ValueError), match="already holds"):
        tune(config, {"learning_rate": [1e-3]}, trials=3, held_out=0.5)


def test_the_command_searches_and_says_what_won(config, tmp_path, monkeypatch):
    monkeypatch.setattr(renyi, "draw_trials", lambda *_: 1)
    monkeypatch.setattr(tuning, "LEAST_JUDGES", 5)
    settings = tmp_path / "settings.yaml"
    dataclasses.replace(config, eval=None, batch_size=8).save(settings)
    arguments = ["tune", settings, "--try", "learning_rate=1e-3", "--try", "lora_r=1,2", "--held-out", 0.5]
    said = told(*arguments)
    # How many trials ran would be read off whatever each of them says.
    assert not re.search("reading data|loading the model|rehearsing|to come|evaluating|writing", said)
    assert re.search(r"won: learning_rate 0\.001, lora_r [12], noised loss of the judges [\d.-]+", said)
    assert re.search(r"privacy of the whole search: epsilon [\d.]+ at delta 0\.001", said)
    assert Card.load(tmp_path / "run" / "card.json")["tuning"]["expected_trials"] == 6.0
    assert "write a setting and its values" in refused(*arguments, "--try", "learning_rate")


def test_a_search_that_fails_has_paid(config, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tuning, "finetune", fail)
    monkeypatch.setattr(tuning, "LEAST_JUDGES", 5)
    with pytest.raises(RuntimeError, match="out of memory"):
        tune(dataclasses.replace(config, batch_size=8), trials=3, held_out=0.5)
    assert Ledger.read(tmp_path / "run" / "ledger.jsonl").spent_steps == 1


def test_an_interrupted_search_goes_on_and_pays_no_more(config, tmp_path, monkeypatch):
    """Two trials, of which the second is cut short: the first keeps its score, the other is made, and all is paid once."""
    monkeypatch.setattr(renyi, "draw_trials", lambda shape, stop, drawn: drawn and 2)
    monkeypatch.setattr(tuning, "LEAST_JUDGES", 5)
    made, real = [], tuning.finetune

    def counted(own, **options):
        made.append(own.output)
        if len(made) == 2:
            raise Stopped
        return real(own, **options)

    monkeypatch.setattr(tuning, "finetune", counted)
    config = dataclasses.replace(config, eval=None, batch_size=8)
    search = {"candidates": {"learning_rate": [1e-3]}, "trials": 3, "held_out": 0.5}
    with pytest.raises(ConfigError, match="no search to resume"):
        tune(config, **search, resume=True)
    with pytest.raises(Stopped):
        tune(config, **search)
    kept = json.loads((tmp_path / "run" / ".trials" / "search.json").read_text())
    assert [name for _, name in kept["done"]] == [made[0].rpartition("/")[2]]
    for other in ({**search, "trials": 4}, {**search, "candidates": {"learning_rate": [2e-3]}}):
        with pytest.raises(ConfigError, match="these are others"):
            tune(config, **other, resume=True)
    with pytest.raises(ValueError, match="already holds"):
        tune(config, **search)
    found = tune(config, **search, resume=True)
    assert len(set(made)) == len(made) == 3
    output = tmp_path / "run"
    assert Ledger.read(output / "ledger.jsonl").spent_steps == 1
    assert found.score <= kept["done"][0][0]
    assert found.epsilon <= 8
    assert verify(output / "card.json", weights=output, ledger=output / "ledger.jsonl").guarantee
    assert not (output / ".trials").exists()


@cases(
    ("settings", "arguments", "message"),
    [
        ({"method": "frost"}, {}, "by dpsgd"),
        ({"epsilon": math.inf}, {}, "finite epsilon"),
        ({"private_metrics": 1.0}, {}, "no curves"),
        ({}, {"candidates": {"batch_size": [8, 16]}}, "batch_size cannot be searched"),
        ({}, {"candidates": {"learning_rate": []}}, "no value"),
        ({}, {"candidates": {"learning_rate": ["fast"]}}, "learning_rate must be a number, not 'fast'"),
        ({}, {"candidates": {"learning_rate": [-1.0]}}, "learning_rate is -1.0: it must be greater"),
        ({}, {"trials": 1.0}, "more than 1"),
        ({}, {"shape": -1.0}, "above -1"),
        ({}, {"held_out": 1.0}, "between 0 and 1"),
        ({}, {}, "too few to choose by"),
    ],
)
def test_refusals_come_before_anything_is_spent(config, tmp_path, settings, arguments, message):
    with pytest.raises(ConfigError, match=message):
        tune(dataclasses.replace(config, **settings), **arguments)
    assert not (tmp_path / "run").exists()


def test_a_row_that_is_no_text_is_found_before_anything_is_spent(config, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "LEAST_JUDGES", 1)
    rows = [{"text": "good day"}] * 60 + [{"text": None}]
    train = tmp_path / "gap.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="line 61"):
        tune(dataclasses.replace(config, train=str(train), eval=None, text_column="text", batch_size=8), held_out=0.5)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("shape", [0.0, 1.0])
def test_the_best_of_as_many_trials_as_the_law_says_is_chosen(shape):
    """What the choice costs, and the law of the number of trials: tests/accounting/test_renyi.py."""
    stop, scores = renyi.stop_for(8, shape), random.Random(0).choices(range(1000), k=200)
    for drawn in (0.01, 0.3, 0.6, 0.9, 0.99):
        count = renyi.draw_trials(shape, stop, drawn)
        assert best_of(lambda number: (scores[number], number), shape, stop, drawn) == min(
            zip(scores[:count], range(count))
        )
