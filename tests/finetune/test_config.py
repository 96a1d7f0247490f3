"""Settings: how they are read, and which are refused."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fastdp.finetune import ConfigError, load_config


def test_settings_from_yaml_and_flags(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("learning_rate: 1e-3\nepsilon: inf\nlabels: [0, 1]\nmax_length: 64.0\n")
    config = load_config(
        path, {"epsilon": 3, "labels": "yes,no", "method_options": "{groups: per_layer}", "model": None}
    )
    assert config.method_options == {"groups": "per_layer"}
    assert config.learning_rate == 1e-3
    assert config.epsilon == 3
    assert config.labels == ["yes", "no"]
    assert config.max_length == 64
    assert config.model is None


@pytest.mark.parametrize("given", ["a,b", "a, b", "[a, b]", '["a","b"]', "['a', 'b']", ["a", "b"]])
def test_lists_are_read_as_their_message_suggests(given):
    assert load_config(None, {"labels": given}).labels == ["a", "b"]
    for wrong in ("[a, b", "[[a], b]"):
        with pytest.raises(ConfigError, match="labels must be a list"):
            load_config(None, {"labels": wrong})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning_rate: 1", "unknown setting 'lerning_rate'; did you mean learning_rate"),
        ("zzzz: 1", "known settings: model"),
        ("learning_rate: fast", "learning_rate must be a number, not 'fast'"),
        ("epochs: [1]", "epochs must be a number"),
        ("batch_size: 1.5", "batch_size must be a whole number"),
        ("gradient_checkpointing: maybe", "must be true or false"),
        ("method_options: 3", "must be a mapping"),
        ("- a", "must hold settings"),
        ("a: [", "line 2: not valid YAML"),
    ],
)
def test_bad_yaml(tmp_path, text, message):
    path = tmp_path / "a.yaml"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError, match=message):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot read the config"):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": None}, "model is missing"),
        ({"epsilon": None}, "epsilon is missing"),
        ({"epsilon": 0.0}, "epsilon is .*: it must be greater than 0"),
        ({"epsilon": math.nan}, "epsilon is .*: it must be greater than 0"),
        ({"delta": 1.0}, "delta is 1.0: it must be greater than 0 and below 1"),
        ({"peft": "loar"}, "peft is 'loar': it must be one of full, lora"),
        ({"epochs": 0}, "epochs is 0: it must be greater than 0"),
        ({"noise_rounds": 14}, "noise_rounds is 14: it must be 20 or 12"),
        ({"noise_rounds": 12, "method": "ewft"}, "ewft adds none there: leave it out"),
        ({"warmup": 1.0}, "warmup is 1.0: it must be at least 0 and below 1"),
        ({"task": "classification"}, "labels must list"),
        ({"task": "classification", "labels": ["a", "a", "b"]}, "a label twice"),
        ({"task": "classification", "labels": ["a", "b"], "prompt_column": "x"}, "belongs to causal-lm"),
        ({"labels": ["a", "b"]}, "belongs to classification"),
        ({"prompt_column": "x"}, "go together"),
        ({"prompt_column": "x", "target_column": "y", "text_column": "z"}, "not both"),
    ],
)
def test_bad_settings(config, settings, message):
    with pytest.raises(ConfigError, match=message):
        replace(config, **settings).check()


def test_examples_of_the_repository_are_valid():
    for path in Path(__file__).parents[2].glob("examples/*.yaml"):
        needed = {"model": "m", "train": "t", "eval": "e", "output": "o", "epsilon": 8}
        config = load_config(path, needed)
        config.epsilon = None if config.method == "sap" else 8.0
        config.check()
        assert not set(needed) & set(yaml.safe_load(path.read_text()))
