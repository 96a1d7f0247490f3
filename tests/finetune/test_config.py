"""Settings: how they are read, and which are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fastdp.finetune import ConfigError, load_config
from tests.cases import cases


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
    assert load_config(None, {"batch_size": 10**20}).batch_size == 10**20
    assert config.model is None


def test_words_of_lists_are_those_that_are_written(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("labels: [no, yes, 007, 1:30, null, 2020-01-01]\nprompt_column: mr\ncapture: no\nlora_fixed: on\n")
    config = load_config(path)
    assert config.labels == ["no", "yes", "007", "1:30", "null", "2020-01-01"]
    assert (config.prompt_column, config.capture, config.lora_fixed) == (["mr"], False, True)
    config.save(path)
    assert load_config(path) == config
    assert load_config(None, {"labels": "[no, yes]"}).labels == ["no", "yes"]


@cases("given", ["a,b", "a, b", "[a, b]", '["a","b"]', "['a', 'b']", ["a", "b"]])
def test_lists_are_read_as_their_message_suggests(given):
    assert load_config(None, {"labels": given}).labels == ["a", "b"]
    for wrong in ("[a, b", "[[a], b]"):
        with pytest.raises(ConfigError, match="labels must be a list"):
            load_config(None, {"labels": wrong})


@cases(
    ("text", "message"),
    [
        ("lerning_rate: 1", "unknown setting 'lerning_rate'; did you mean learning_rate"),
        ("zzzz: 1", "unknown setting 'zzzz'; the documentation lists all"),
        ("learning_rate: fast", "learning_rate must be a number, not 'fast'"),
        ("epochs: [1]", "epochs must be a number"),
        ("batch_size: 1.5", "batch_size must be a whole number"),
        ('output: "a\\0b"', "output must be text"),
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


@cases(
    ("settings", "message"),
    [
        ({"model": None}, "model is missing"),
        ({"epsilon": None}, "epsilon is missing"),
        ({"epsilon": 0.0}, "epsilon is .*: it must be greater than 0"),
        ({"delta": 1.0}, "delta is 1.0: it must be greater than 0 and below 1"),
        ({"peft": "loar"}, "peft is 'loar': it must be one of full, lora"),
        ({"lora_r": 10**8}, "lora_r is .*: it must be at least 1 and at most 65536"),
        ({"seed": 2**70}, "seed is .*: it must be at least .* and below"),
        ({"noise_rounds": 14}, "noise_rounds is 14: it must be 20 or 12"),
        ({"noise_rounds": 12, "method": "ewft"}, "ewft adds none there: leave it out"),
        ({"shapes": "public", "method": "ewft"}, "shapes: public needs a method that clips rows"),
        ({"task": "classification"}, "labels must list"),
        ({"task": "classification", "labels": ["a", "a", "b"]}, "a label twice"),
        ({"task": "classification", "labels": ["a", "b"], "prompt_column": "x"}, "belongs to causal-lm"),
        ({"labels": ["a", "b"]}, "belongs to classification"),
        ({"lora_fixed": True, "peft": "bitfit"}, "lora_fixed belongs to lora; this run has peft: bitfit"),
        ({"target_modules": ["x"], "peft": "prompt"}, "target_modules belongs to lora, .*; this run has peft: prompt"),
        ({"prompt_column": "x"}, "go together"),
        ({"messages_column": "x", "text_column": "y"}, "not both"),
        ({"messages_column": "x", "method": "ewft"}, "perturbs texts, not conversations"),
        ({"messages_column": "x", "task": "regression"}, "messages_column belongs to causal-lm"),
        ({"encoding": "rot13"}, "encoding 'rot13' is not known: write utf-8"),
        ({"encoding": "hex"}, "encoding 'hex' is not known"),
        ({"user_column": "x"}, "user_column and max_examples_per_user go together"),
        ({"encoding": "idna"}, "encoding 'idna' is not known: write utf-8"),
        ({"encoding": "unicode_escape"}, "encoding 'unicode_escape' is not known"),
        ({"encoding": "latin-1\0"}, "encoding 'latin-1.*' is not known"),
        ({"encoding": "undefined"}, "encoding 'undefined' is not known"),
        ({"max_examples_per_user": 2}, "go together"),
        ({"user_column": "x", "max_examples_per_user": 9}, "exceeds physical_batch_size 8: lower the first"),
        ({"user_column": "x", "max_examples_per_user": 2, "method": "ewft"}, "user_column does not fit ewft"),
        ({"user_column": "x", "max_examples_per_user": 2, "private_metrics": 1.0}, "not people"),
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
