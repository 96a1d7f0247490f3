"""A plan before a run: its noise is what the run will calibrate, its suggestion runs, and it spends nothing."""

import dataclasses
import math

import pytest
import torch
import yaml
from typer.testing import CliRunner

from fastdp.accounting import dpsgd, epsilon
from fastdp.cli import app
from fastdp.finetune import plan as planning
from fastdp.finetune.config import ConfigError, load_config
from fastdp.finetune.models import load_tokenizer, load_trained
from fastdp.finetune.plan import LEAST_STEPS, Machine, measure, plan
from tests.test_finetune import config, files, model_folder  # noqa: F401

MACHINE = Machine(0.01, 0.1, 1 << 30, 8, "measured here, on a test's word")


@pytest.fixture
def planned(config, monkeypatch):  # noqa: F811
    monkeypatch.setattr(planning, "measure", lambda *_: MACHINE)
    return lambda minutes=None, **settings: plan(dataclasses.replace(config, **settings), 1500, 32, minutes)


def test_the_noise_of_every_option_meets_the_budget(planned, config):  # noqa: F811
    found = planned(delta=1e-5)
    assert [option.batch_size for option in found.options] == [2**k for k in range(4, 9)]
    for option in found.options:
        assert option.steps == math.ceil(option.epochs * math.ceil(1500 / option.batch_size))
        spent = epsilon(dpsgd(option.noise_multiplier, option.batch_size / 1500, option.steps), 1e-5)
        assert 0.99 * 8 < spent <= 8
        assert option.seconds == pytest.approx(option.steps * (0.1 + 0.01 * option.batch_size))
        ratio = option.noise_multiplier * math.sqrt(found.trained_parameters) / option.batch_size
        assert option.step_ratio == pytest.approx(ratio)
        assert option.run_ratio == pytest.approx(ratio / math.sqrt(option.steps))
    assert found.best.steps >= LEAST_STEPS
    assert found.best.run_ratio == min(o.run_ratio for o in found.options if o.steps >= LEAST_STEPS)


def test_less_time_is_kept_to_and_less_budget_asks_for_a_smaller_rank(planned):
    hurried, slow = planned(minutes=1.0, delta=1e-5), planned(delta=1e-5)
    assert hurried.best.seconds <= 1 * 60 * 1.01 < slow.best.seconds
    assert hurried.best.steps >= LEAST_STEPS
    ranks = [planned(epsilon=budget, delta=1e-5).config.lora_r for budget in (0.1, 100.0)]
    assert ranks == sorted(ranks)
    assert ranks[0] < ranks[-1]
    assert slow.config.lora_alpha == 8 * slow.config.lora_r


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({"epsilon": None}, {}, "a plan needs a budget"),
        ({"epsilon": math.inf}, {}, "a plan needs a budget"),
        ({"delta": 0.1}, {}, "delta is 0.1"),
        ({}, {"minutes": 1e-4}, "too short"),
        ({}, {"minutes": -1.0}, "greater than 0"),
    ],
)
def test_refusals(planned, settings, arguments, message):
    with pytest.raises(ConfigError, match=message):
        planned(**{"delta": 1e-5, **settings, **arguments})


def test_measuring_takes_private_steps_and_leaves_the_model_as_it_was(config):  # noqa: F811
    tokenizer = load_tokenizer(config)
    model = load_trained(config, tokenizer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = measure(model, tokenizer, config, 16)
    assert found.example_seconds > 0
    assert found.release_seconds > 0
    assert found.peak_bytes > sum(p.numel() * 4 for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


PLANNED = "--examples 400 --epsilon 8 --delta 1e-4 --max-length 48".split()


def test_the_command_writes_settings_that_a_run_takes(model_folder, tmp_path):  # noqa: F811
    picture, written = tmp_path / "plan.png", tmp_path / "plan.yaml"
    arguments = ["plan", "--model", model_folder, "--length", 12, *PLANNED]
    arguments += ["--physical-batch-size", 4, "--picture", picture, "--write", written]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert "suggested" in done.output
    assert "measured here" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    settings = load_config(written)
    assert settings.batch_size in (16, 32, 64, 128)
    assert yaml.safe_load(written.read_text())["model"] == str(model_folder)


def test_a_gpu_is_simulated_and_said_to_be(model_folder):  # noqa: F811
    pytest.importorskip("triton")
    arguments = ["plan", "--model", model_folder, "--length", 16, *PLANNED]
    arguments += ["--physical-batch-size", 2, "--gpu", "h100", "--peft", "full"]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert "SIMULATED" in done.output
    refused = CliRunner().invoke(app, [str(argument) for argument in [*arguments, "--gpu", "abacus"]])
    assert refused.exit_code == 1
