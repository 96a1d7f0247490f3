"""The command: its figures, its refusals in one sentence, and a run from the shell."""

import io
import json
import re
import subprocess
import sys

import pytest
import typer
import yaml
from rich.console import Console
from typer.testing import CliRunner

from fastdp.accounting.exports import FORMATS, SUFFIXES
from fastdp.cli import app
from fastdp.commands import training
from fastdp.distribution import installed_version
from fastdp.finetune.reporter import Forecast
from tests.finetune.conftest import MACHINE, files, model_folder  # noqa: F401 - fixtures

runner = CliRunner()


def run(*arguments):
    return runner.invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def told(*arguments):
    """What a command says that does what it was asked, on one line."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def refused(*arguments):
    """The one sentence a command refuses with."""
    result = run(*arguments)
    assert result.exit_code != 0
    message = result.stderr.strip()
    assert message.startswith("error: ")
    assert "\n" not in message
    assert "Traceback" not in result.output
    return message


PLAN = ("--examples", 67349, "--batch-size", 32, "--epochs", 3)


def test_epsilon_gives_the_known_figures():
    """32 of 67,349 examples at noise .5 for 6,315 steps: 3.04736 by PLD, 4.1525 by RDP."""
    output = run("epsilon", "--noise-multiplier", 0.5, *PLAN, "--compare").output
    figures = dict(re.findall(r"(pld|prv|rdp)\W+([\d.]+)", output))
    assert "6315 steps" in output
    assert float(figures["pld"]) == pytest.approx(3.04736, abs=2e-4)
    assert 3.047 < float(figures["prv"]) < 3.06
    assert float(figures["rdp"]) == pytest.approx(4.1525, abs=1e-3)


def test_calibrate_is_the_inverse_of_epsilon():
    output = run("calibrate", "--epsilon", 3.05, *PLAN).output
    sigma = float(re.search(r"noise multiplier\s+([\d.]+)", output).group(1))
    assert sigma == pytest.approx(0.5, abs=1e-3)
    assert float(re.search(r"epsilon\s+([\d.]+)", output).group(1)) <= 3.05


@pytest.mark.parametrize(
    "command", [("calibrate", "--epsilon", 8), ("epsilon", "--noise-multiplier", 1)], ids=lambda command: command[0]
)
@pytest.mark.parametrize(("delta", "warned"), [(1e-5, False), (1 / 67349, True), (0.1, True)])
def test_a_delta_that_finetune_refuses_is_warned_of(command, delta, warned):
    result = run(*command, *PLAN, "--delta", delta)
    assert result.exit_code == 0
    assert ("is not below 1/N" in result.stderr and "Lower delta" in result.stderr) is warned


def test_the_version_is_shown():
    result = run("--version")
    assert (result.exit_code, result.output.strip()) == (0, f"fastdp {installed_version()}")


def test_a_wrong_key_is_found_before_libraries_are_imported(tmp_path):
    (tmp_path / "typo.yaml").write_text("lerning_rate: 1\n")
    needed = ["--model=m", "--train=t", "--output=o", "--epsilon=8"]
    for words, arguments in (
        ("did you mean learning_rate", [str(tmp_path / "typo.yaml")]),
        ("user_column and max_examples_per_user go together", [*needed, "--user-column=p"]),
    ):
        code = (
            "import sys; from typer.testing import CliRunner; from fastdp.cli import app\n"
            f"print(CliRunner().invoke(app, ['finetune', *{arguments!r}]).stderr)\n"
            "print('torch' in sys.modules)"
        )
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert words in said
        assert said.strip().endswith("False")


@pytest.mark.parametrize("peft", ["full", "lora"])
def test_doctor_lists_every_trained_parameter(model_folder, peft):  # noqa: F811
    output = run("doctor", model_folder, "--peft", peft).output
    assert all(name in output for name in ("instruction set", "torch", "threads", "GPU", "triton"))
    expected = ["transformer.wte.weight", "transformer.h.1.mlp.c_proj.bias"] if peft == "full" else ["lora_A", "lora_B"]
    lines = output.splitlines()
    for name in expected:
        number = next(n for n, line in enumerate(lines) if name in line)
        assert " " not in lines[number], "a name stays whole"
        uses, route, cost = lines[number + 1].strip().split("; ")
        assert uses
        assert route
        assert "layer" in cost or "pass" in cost or "product" in cost


def test_a_run_is_told_in_80_columns(monkeypatch):
    monkeypatch.setattr(training, "console", Console(file=io.StringIO(), width=80))
    with training.ProgressReporter() as reporter:
        reporter.step(1995, 2000, 10.123, 7.99, Forecast(5, 7500.0, 120 << 30, 8.0, 1e-5))
    bar, state = training.console.file.getvalue().splitlines()
    assert re.search(r"━{20}.* 1995/2000$", bar)
    assert state.strip() == "loss 10.123 (unprotected)  epsilon 7.99 of 8  120.0 GiB  2 h 5 min left"


def test_finetune_from_flags_alone_and_verify(model_folder, files, tmp_path):  # noqa: F811
    output = tmp_path / "run"
    data = files / "text.jsonl"
    arguments = ["--model", model_folder, "--train", data, "--eval", data, "--output", output, "--epsilon", 8]
    arguments += ["--delta", 1e-3, "--batch-size", 16, "--epochs", 1, "--max-length", 48, "--peft", "ia3"]
    assert "perplexity" in told("finetune", *arguments)
    assert yaml.safe_load((output / "config.yaml").read_text())["peft"] == "ia3"
    assert "already holds a run" in refused("finetune", *arguments)
    # The folder alone says which run to go on with.
    assert "is finished: there is nothing to resume" in refused("finetune", "--resume", "--output", output)
    assert output.stat().st_mode & 0o077 == 0
    readable = {path.name for path in output.iterdir() if path.stat().st_mode & 0o077}
    assert readable == {"card.json", "card.md", "adapter"}, "losses and settings are the owner's"

    assert told("verify", output / "card.json")
    # The folder alone: with its weights and its ledger.
    whole = told("verify", output)
    assert "give it to compare" not in whole
    assert "give them to compare" not in whole
    assert told("verify", output / "adapter")
    assert "written to" in told("card", "export", output)
    assert told("verify", output / "card-html.html")
    (tmp_path / "empty").mkdir()
    assert "holds no card.json" in refused("verify", tmp_path / "empty")
    assert "holds no card.json" in refused("card", "export", tmp_path / "empty")
    with open(output / "ledger.jsonl", "r+") as file:
        file.truncate(len(file.readline()))
    assert "cut back" in refused("verify", output)
    card = json.loads((output / "card.json").read_text())
    card["epsilon"]["upper_bound"] /= 2
    (tmp_path / "forged.json").write_text(json.dumps(card))
    assert "does not hold" in refused("verify", tmp_path / "forged.json")

    for form in FORMATS:
        assert "written to" in told("card", "export", output / "card.json", "--format", form)
        assert told("verify", output / f"card-{form}{SUFFIXES[form]}")
    assert told("verify", output / "adapter" / "README.md", "--weights", output / "adapter")
    assert str(tmp_path) not in (output / "adapter" / "README.md").read_text()
    assert "not passed on" in refused("card", "export", tmp_path / "forged.json", "--format", "html")


def test_a_lack_of_memory_is_told_in_a_sentence():
    code = (
        "import sys, numpy, fastdp.accounting.pld as pld; sys.argv[0] = 'fastdp'\n"
        "pld.certified_epsilon = lambda *args: numpy.empty(1 << 50)\n"
        "from fastdp.cli import app; app()"
    )
    plan = ["--noise-multiplier", "1", "--examples", "400", "--batch-size", "100", "--epochs", "1"]
    done = subprocess.run([sys.executable, "-c", code, "epsilon", *plan], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: memory ran out: take fewer steps or examples")
    assert len(done.stderr.splitlines()) == 1


def _every_command(command=None, path=()):
    command = command or typer.main.get_command(app)
    if subcommands := getattr(command, "commands", None):
        return [found for name, own in subcommands.items() for found in _every_command(own, (*path, name))]
    return [(path, command)]


def test_help_names_and_explains_everything_in_80_columns():
    for path, command in _every_command():
        shown = runner.invoke(app, [*path, "--help"], env={"COLUMNS": "80", "NO_COLOR": "1"}).output
        assert max(map(len, shown.splitlines())) <= 80
        words, cut = set(re.findall(r"[\w|-]+", shown)), re.findall(r".*…", shown)
        assert (path, cut) == (path, [])
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                assert re.search(rf"^ {(parameter.metavar or parameter.name).upper()}: ", shown, re.MULTILINE), path
            elif not parameter.hidden:
                assert words.issuperset(parameter.opts), path


def test_a_switch_of_the_config_is_turned_off_by_a_flag(model_folder, files, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("fastdp.finetune.plan.measure", lambda *_: MACHINE)
    config = tmp_path / "settings.yaml"
    config.write_text(yaml.safe_dump({"lora_fixed": True, "gradient_checkpointing": True}))
    arguments = ["plan", config, "--model", model_folder, "--train", files / "text.jsonl", "--epsilon", 8]
    arguments += ["--delta", 1e-3, "--max-length", 48, "--write", tmp_path / "out.yaml", "--no-lora-fixed"]
    assert told(*arguments)
    written = yaml.safe_load((tmp_path / "out.yaml").read_text())
    assert not written.get("lora_fixed")
    assert written["gradient_checkpointing"]
    assert "give one of them" in run(*arguments, "--lora-fixed").output


def test_an_interrupt_of_what_cannot_be_resumed_is_a_sentence_and_130(tmp_path, monkeypatch):
    """Of other methods, and before anything is released: tests/test_bad_input.py."""

    def interrupted(settings, **_):
        (tmp_path / "config.yaml").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr("fastdp.finetune.finetune", interrupted)
    needed = ("--model", "m", "--train", "t", "--epsilon", 8)
    found = run("finetune", "--method", "ewft", "--output", tmp_path, *needed)
    assert found.exit_code == 130
    message = " ".join(found.stderr.split())
    assert "cannot be resumed" in message
    assert "error" not in message
    assert "130" not in message
