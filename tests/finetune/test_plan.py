"""A plan before a run: its noise is what the run will calibrate, its suggestion runs, and it spends nothing."""

import dataclasses
import math
import time

import pytest
import torch
import yaml
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import fastdp
from fastdp.accounting import dpsgd, epsilon
from fastdp.cli import app
from fastdp.data import Examples
from fastdp.finetune import plan as planning
from fastdp.finetune.config import ConfigError, load_config
from fastdp.finetune.machine import measure
from fastdp.finetune.models import load_tokenizer, load_trained
from fastdp.finetune.plan import LEAST_STEPS, SCALE, plan
from tests.cases import cases
from tests.finetune.conftest import MACHINE
from tests.test_cli import refused, told


@pytest.fixture
def planned(config, monkeypatch):
    monkeypatch.setattr(planning, "measure", lambda *_: MACHINE)
    return lambda minutes=None, passes=10.0, **settings: plan(
        dataclasses.replace(config, **settings), 1500, 32, minutes, passes=passes
    )


def test_the_noise_of_every_option_meets_the_budget(planned, config):
    found = planned(delta=1e-5)
    assert [option.batch_size for option in found.options] == [2**k for k in range(4, 9)]
    for option in found.options:
        assert option.steps == math.ceil(option.epochs * math.ceil(1500 / option.batch_size))
        spent = epsilon(dpsgd(option.noise_multiplier, option.batch_size / 1500, option.steps), 1e-5)
        assert 0.99 * 8 < spent <= 8
        parts = option.batch_size / 8  # and a part of one, since logical batches vary
        least, most = (3.0 + option.steps * (0.1 + 32e-4 * option.batch_size + 0.02 * n) for n in (parts, parts + 1))
        assert 0.98 * least < option.seconds < 1.02 * most
        ratio = option.noise_multiplier * math.sqrt(found.trained_parameters) / option.batch_size
        assert option.step_ratio == pytest.approx(ratio)
        assert option.run_ratio == pytest.approx(ratio / math.sqrt(option.steps))
    assert found.best.steps >= LEAST_STEPS
    assert found.best.run_ratio == min(o.run_ratio for o in found.options if o.steps >= LEAST_STEPS)
    assert found.config.lora_alpha == SCALE * found.config.lora_r
    hurried = planned(minutes=1.0, delta=1e-5)
    assert hurried.best.seconds <= 1 * 60 * 1.01 < found.best.seconds
    assert hurried.best.steps >= LEAST_STEPS
    with pytest.raises(ConfigError, match="allow more passes"):
        planned(passes=0.1, delta=1e-5)


@cases(
    ("settings", "arguments", "message"),
    [
        ({"epsilon": None}, {}, "a plan needs a budget"),
        ({"epsilon": math.inf}, {}, "a plan needs a budget"),
        ({"delta": 0.1}, {}, "delta is 0.1"),
        ({"method": "dpzo"}, {}, "leave method out"),
        ({}, {"minutes": 1e-4}, "too short"),
        ({}, {"minutes": -1.0}, "greater than 0"),
    ],
)
def test_refusals(planned, settings, arguments, message):
    with pytest.raises(ConfigError, match=message):
        planned(**{"delta": 1e-5, **settings, **arguments})


def test_measuring_takes_private_steps_and_leaves_the_model_as_it_was(config, monkeypatch):
    # Other programs take no processor time of ours.
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    tokenizer = load_tokenizer(config)
    model = load_trained(config, tokenizer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = measure(model, tokenizer, config, (4, 12, 16))
    assert found.microbatch_seconds + 16 * found.token_seconds > 0
    assert found.release_seconds > 0
    assert found.start_seconds > found.look_seconds >= 0
    assert found.peak_bytes > sum(p.numel() * 4 for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_step_is_padded_as_the_private_loader_pads_it():
    """Lengths drawn by the plan, and tokens of micro-batches that a loader cuts, agree within 3% on average."""
    lengths = (5, 9, 40)
    spread = torch.cat([torch.linspace(5, 9, 200), torch.linspace(9, 40, 200)]).round().int().tolist()
    rows = Examples([{"input_ids": [0] * length} for length in spread], 0)
    model = torch.nn.Linear(1, 1)
    private = fastdp.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, batch_size=50), noise_multiplier=1.0,
        target_delta=1e-5, epochs=1, max_physical_batch_size=16, unsafe_seed=0,
    )  # fmt: skip
    loader, tokens, parts, seen = private.data_loader, 0, 0, set()
    drawn = [units for _ in range(50) for units in loader.sampler.epoch(8)]
    for units in drawn:
        for indices, _ in loader.micro_batches(units):
            longest = max(spread[index] for index in indices)
            tokens, parts, seen = tokens + longest * len(indices), parts + 1, seen | {longest}
    machine = dataclasses.replace(MACHINE, physical=16, lengths=lengths, release_seconds=0.0)
    by_tokens = dataclasses.replace(machine, microbatch_seconds=0.0, token_seconds=1.0)
    assert by_tokens.step_seconds(50) == pytest.approx(tokens / 400, rel=0.03)
    by_parts = dataclasses.replace(machine, microbatch_seconds=1.0, token_seconds=0.0)
    assert by_parts.step_seconds(50) == pytest.approx(parts / 400, rel=0.03)
    assert machine.once_seconds(50, 400) == pytest.approx(3.0 + 0.5 * (len(seen) - 1), rel=0.1)
    assert machine.once_seconds(50, 1) < machine.once_seconds(50, 20)
    private.detach()


PLANNED = "--examples 400 --epsilon 8 --delta 1e-4 --max-length 48".split()


def test_the_command_writes_settings_that_a_run_takes(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "measure", lambda *_: MACHINE)
    written = tmp_path / "plan.yaml"
    arguments = ["plan", "--model", model_folder, "--length", "4,12,20", *PLANNED]
    arguments += ["--physical-batch-size", 4, "--write", written]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert "suggested" in done.output
    assert "measured here" in done.output
    assert "…" not in done.output, "no heading is cut at 80 characters"
    assert "write whole numbers" in refused(*arguments[:3], "--length", "long", *PLANNED)
    settings = load_config(written)
    assert settings.batch_size in (16, 32, 64, 128)
    assert yaml.safe_load(written.read_text())["model"] == str(model_folder)


def test_people_are_counted_where_they_are_protected(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "measure", lambda *_: MACHINE)
    data = tmp_path / "notes.csv"
    data.write_text("text,patient\n" + "".join(f"hello number {i},p{i % 50}\n" for i in range(200)))
    arguments = ["plan", "--model", model_folder, "--length", 6, "--train", data, "--epsilon", 8, "--delta", "1e-4"]
    arguments += ["--max-length", 48, "--user-column", "patient", "--max-examples-per-user", 3]
    assert "50 people, epsilon 8" in told(*arguments)
    assert "20 people are too few" in refused(*arguments, "--examples", 20)


def test_a_step_runs_every_row_of_its_people():
    machine = dataclasses.replace(MACHINE, physical=16, lengths=(4, 12), rows=3.0)
    assert machine.step_seconds(20) == dataclasses.replace(machine, rows=1.0).step_seconds(60)
