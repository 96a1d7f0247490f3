"""The examples of each kind of file: made, trained on from the command line, and verified."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from fastdp.cli import app

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
#: `tests/test_commands.py` runs the other kinds. The settings of each, the file, and what the card calls the unit.
FORMATS = {
    "chat": ("messages.jsonl", "example"),
    "people": ("functions.csv", "user"),
}


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files, which the example's own program writes."""
    place = importlib.util.spec_from_file_location("functions", EXAMPLES / "functions.py")
    assert place is not None
    assert place.loader is not None
    program: Any = importlib.util.module_from_spec(place)
    place.loader.exec_module(program)
    folder = tmp_path_factory.mktemp("functions")
    every, program.MODULES = program.functions, program.MODULES[:24]
    program.functions = lambda: list(every())[::4]
    assert program.write(folder) > 64
    return folder


@pytest.fixture(scope="module")
def chat_model(model_folder: Path) -> Path:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model_folder)
    return model_folder


@pytest.mark.parametrize("name", FORMATS)
def test_an_example_of_each_kind_of_file_trains(name: str, functions: Path, chat_model: Path, tmp_path: Path) -> None:
    file, unit = FORMATS[name]
    run = tmp_path / name
    words = ["finetune", str(EXAMPLES / f"{name}.yaml"), "--model", str(chat_model), "--train", str(functions / file)]
    cut = ["--max-length", "48", "--epochs", "1", "--samples", "0", "--batch-size", "16"]
    done = CliRunner().invoke(app, [*words, "--epsilon", "8", "--output", str(run), *cut])
    assert done.exit_code == 0, done.output
    card = json.loads((run / "card.json").read_text())
    assert card["unit"].startswith(unit)
    assert card["steps"]["spent"] == card["steps"]["planned"] > 0
    assert CliRunner().invoke(app, ["verify", str(run)]).exit_code == 0
