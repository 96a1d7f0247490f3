"""What people bring that cannot work: each ends in one sentence that says what is wrong and what to do, and nothing is lost.

Tables, settings and tasks have more in tests/test_tables.py and tests/finetune.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import transformers as hf
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import fastdp.files as files
from fastdp.cli import app
from fastdp.finetune import FinetuneConfig, Reporter, finetune
from fastdp.quickstart.corpus import private_records
from tests.test_files import small_files
from tests.tokenizers_for_tests import small_gpt2


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Models, files and runs, good and bad, below one folder."""
    root = tmp_path_factory.mktemp("world")
    _models(root)
    _files(root)
    _runs(root)
    return root


def _models(root):
    _, tokenizer = small_gpt2(root / "model", n_layer=1, n_embd=16)
    t5 = {"vocab_size": len(tokenizer), "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    hf.T5ForConditionalGeneration(hf.T5Config(**t5)).save_pretrained(root / "t5")
    tokenizer.save_pretrained(root / "t5")
    settings = json.loads((root / "t5" / "config.json").read_text())
    (root / "t5" / "config.json").write_text(json.dumps(settings | {"decoder_start_token_id": None}))
    for name in ("no-tokenizer", "no-weights", "cut", "nan", "no-pad", "headless", "bad-config", "narrow"):
        shutil.copytree(root / "model", root / name)
    (root / "bad-config" / "config.json").write_text("[")
    (root / "torn").mkdir()
    (root / "torn" / "tokenizer.json").write_text("{")
    config = json.loads((root / "narrow" / "config.json").read_text())
    (root / "narrow" / "config.json").write_text(json.dumps(config | {"vocab_size": 3}))
    for file in (root / "no-tokenizer").glob("token*"):
        file.unlink()
    (root / "no-weights" / "model.safetensors").unlink()
    cut = root / "cut" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:3000])
    weights = load_file(root / "nan" / "model.safetensors")
    save_file(
        {name: tensor * float("nan") for name, tensor in weights.items()},
        root / "nan" / "model.safetensors",
        {"format": "pt"},
    )
    kept = {name: tensor for name, tensor in weights.items() if "ln_f" not in name}
    save_file(kept, root / "headless" / "model.safetensors", {"format": "pt"})
    plain = root / "no-pad" / "tokenizer_config.json"
    known = {name: value for name, value in json.loads(plain.read_text()).items() if not name.endswith("_token")}
    plain.write_text(json.dumps(known))
    (root / "empty-folder").mkdir()


def _files(root):
    records = private_records(24, seed=1)
    (root / "good.jsonl").write_text("".join(json.dumps({"text": record}) + "\n" for record in records))
    rows = "".join(f'"{record}",{"often" if "twice" in record else "seldom"},1\n' for record in records)
    (root / "good.csv").write_text(f"text,label,number\n{rows}")
    contents = {
        "blank.csv": "text,label,number\nfine,often,1\n,often,1\n" + rows,
        "chat.jsonl": '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
        "typo.yaml": "lerning_rate: 1\n",
        "blank.txt": "\n\n",
        "spaces.csv": f" text ,label,number\n{rows}",
        "wrapped.json": json.dumps({"data": [{"text": record} for record in records]}),
    }
    for name, content in contents.items():
        (root / name).write_text(content)
    (root / "latin.yaml").write_bytes("model: Größe\n".encode("latin-1"))
    (root / "earlier").mkdir()
    (root / "earlier" / "train.jsonl").write_text("kept")
    (root / "set").mkdir()
    (root / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


class Stop(Reporter):
    """Ends a run like a kill, once it has released something."""

    def step(self, *_):
        raise SystemExit


def _runs(root):
    stopped = FinetuneConfig(**_settings(root), output=str(root / "stopped"), checkpoint_every=1, epsilon=8.0)
    with contextlib.suppress(SystemExit):
        finetune(stopped, reporter=Stop())
    shutil.copytree(root / "stopped", root / "copied")
    (root / "card.json").write_text("{")
    (root / "other.json").write_text("{}")


def _settings(root):
    return {
        **{"model": str(root / "model"), "train": str(root / "good.jsonl"), "delta": 1e-3, "max_length": 32},
        **{"epochs": 2, "batch_size": 12, "physical_batch_size": 12, "lora_r": 1, "samples": 0},
    }


@dataclass(frozen=True)
class Case:
    """A command, or changes of the settings of a good `fastdp finetune`, and words of the sentence: the fault, and the fix."""

    name: str
    fault: str
    fix: str
    changes: dict = field(default_factory=dict)
    config: str | None = None
    flags: tuple = ()
    command: tuple | None = None
    damage: object = None


CSV = {"train": "good.csv", "text_column": "text"}
LABELS = {**CSV, "task": "classification", "labels": "often,seldom"}


def bad_file(name, fault, fix, **changes):
    return Case(f"file {name}", fault, fix, {"train": name, **changes})


def options(method, given):
    return {"method": method, "method_options": given}


FILES = [
    bad_file("absent.csv", "no file", "absent.csv"),
    bad_file("chat.jsonl", "no chat template", "chat_template.jinja"),
    bad_file("empty-folder", "is a folder", "save_to_disk"),
    bad_file("spaces.csv", "no column 'text'", "its columns are ' text ', label, number"),
    bad_file("wrapped.json", "column 'data' .* a nested value, not text", "one object a row"),
    Case("an address", "no file https:/example.com/a.csv", "download it", {"train": "https://example.com/a.csv"}),
    Case("held-out file", "no file", "absent.jsonl", {"eval": "absent.jsonl"}),
    Case("unknown label", "label '(often|seldom)' is not one of", "labels: yes, no", {**LABELS, "labels": "yes,no"}),
    Case("empty text", "line 3: its text is empty", "leave the row out", {**LABELS, "train": "blank.csv"}),
]

SETTINGS = [
    Case("config with a typo", "unknown setting 'lerning_rate'", "did you mean learning_rate", config="typo.yaml"),
    Case("data for a config", "good.csv, line 2: not valid YAML", "--train", config="good.csv"),
    Case("config a folder", "cannot read the config", "directory: .* --resume goes with --output", config="set"),
    Case("config in latin-1", "cannot read the config: it is no UTF-8 text", "", config="latin.yaml"),
    Case("config no file", "cannot read the config: /dev/null is no regular file", "name a file", config="/dev/null"),
    Case("one token", "max_length 1 leaves no token to predict", "raise it", {"max_length": 1}),
    Case("tiny bound", "max_grad_norm is 1e-60: it must be at least 1e-20", "", {"max_grad_norm": 1e-60}),
    Case("unknown flag", "No such option", "--lerning-rate", flags=("--lerning-rate", "1")),
    Case("device", "device abacus cannot be used", "name one of these", {"device": "abacus"}),
    Case("column", "has no column 'body'", "its columns are text", {"text_column": "body"}),
    Case("positions", "has 64 positions, too few for 65", "lower max_length", {"max_length": 65}),
    Case("prompt's positions", "too few for 80", "lower max_length", {"peft": "prompt", "max_length": 60}),
    Case("no such modules", "peft: lora does not fit", "absent", {"target_modules": "absent"}),
    Case("one module", "no module's name ends in 'absent'", "target_modules", {"target_modules": "c_attn,absent"}),
    Case("batch", "batch_size 25 exceeds the 24", "lower it", {"batch_size": 25}),
    Case("half a pass", "whole number", "epochs", {"method": "ewft", "epochs": 1.5}),
    Case(
        "public is private",
        "the private data itself",
        "name public text",
        options("rapft", "{source: {kind: public, data: good.jsonl}}"),
    ),
]

OUTPUTS = [
    Case("no output", "output is missing", "--output", {"output": None}),
]

MODELS = [
    Case("no model", "model is missing", "--model", {"model": None}),
    Case("model's folder", "there is no folder absent", "check it", {"model": "absent"}),
    Case("no model in it", "empty-folder holds no config.json", "name a model's folder", {"model": "empty-folder"}),
    Case("no tokenizer", "has no tokenizer", "put the tokenizer's files beside", {"model": "no-tokenizer"}),
    Case("no config", "bad-config/config.json holds no JSON", "copy it again", {"model": "bad-config"}),
    Case("nothing to pad with", "neither a padding nor an end token", "no-pad", {"model": "no-pad"}),
    Case("no weights", "cannot load", "model.safetensors", {"model": "no-weights"}),
    Case("half a file", "cannot load", "cut", {"model": "cut"}),
    Case("weights of NaN", "loss of nan before any training", "load another copy", {"model": "nan"}),
    Case("a layer missing", "holds no weights of .*ln_f", "not pretrained for it", {"model": "headless"}),
    Case(
        "no beginning",
        "does not say what its decoder begins with",
        "decoder_start_token_id",
        {
            **CSV,
            "model": "t5",
            "task": "seq2seq",
            "text_column": None,
            "prompt_column": "text",
            "target_column": "label",
        },
    ),
]


def cut_ledger(run):
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(lines[:1]))


def damaged(name, content=b"\x00 nothing"):
    return lambda run: (run / name).write_bytes(content)


RESUMES = [
    Case("nothing to resume", "no run to resume", "new", {"output": "new"}, flags=("--resume",)),
    Case("copied", "", "stopped", {"output": "copied"}, flags=("--resume",)),
    Case(
        "ledger gone",
        "is gone, and releases were recorded in it",
        "begin in another folder",
        flags=("--resume",),
        damage=lambda run: (run / "ledger.jsonl").unlink(),
    ),
    Case("ledger cut", "cut", "ledger", flags=("--resume",), damage=cut_ledger),
    Case("ledger damaged", "ledger.jsonl", "", flags=("--resume",), damage=damaged("ledger.jsonl")),
    Case("settings damaged", "config.yaml", "", flags=("--resume",), damage=damaged("config.yaml", b"a: [")),
]

PLAN = "--examples 400 --batch-size 100 --epochs 3"


def command(words, fault, fix=""):
    return Case(words, fault, fix, command=tuple(words.split()))


COMMANDS = [
    command("verify absent.json", "absent.json: no such file", "check the name"),
    command("verify card.json", "card.json"),
    command("verify other.json", "other.json"),
    command("verify good.csv", "this is not a card: it holds no JSON", "give card.json of a run"),
    command("verify other.json --weights absent", "absent: no such file or folder", "check the name"),
    command("report set", "holds no run", "config.yaml"),
    *(
        command(words, "Invalid value for '--.*': [Ff]ile 'set' is a directory")
        for words in (
            *("report stopped --output set", "card export stopped --output set", "attack model --json set"),
            *("prove model --json set", "plan --model model --write set", "synthesize stopped --output set"),
        )
    ),
    command("attack model --kind extraction --names no-tokenizer/model.safetensors", "is no UTF-8 text", "one name on"),
    command("attack model --kind inversion --eta nan --train good.jsonl", "eta must be finite and above 0, got nan"),
    command("attack model --kind extraction --names blank.txt", "holds no names", "one on each line"),
    command("synthesize stopped --output rows.csv", "writes JSON lines", "ends in .jsonl"),
    command("doctor good.csv", "model good.csv is a file", "name the folder"),
    command("doctor empty-folder", "empty-folder holds no config.json", "name a model's folder"),
    command("privatize good.csv out.csv --model absent --eta 5", "there is no folder absent", "check it"),
    command("privatize good.csv out.csv --model good.csv --eta 5", "model good.csv is a file", "name the folder"),
    command("privatize good.csv out.csv --model no-weights --eta 5", "cannot load no-weights", "model.safetensors"),
    command("doctor model --task clasification", "'clasification' is not one of 'causal-lm'"),
    command("prove model --peft loar", "'loar' is not one of 'full'"),
    command("prove model --data good.csv --task classification", "needs every possible label", "--labels"),
    command("plan --model model --examples 400 --epsilon 8 --peft loar", "peft is 'loar'", "one of full, lora"),
    command("plan --model model --examples 400", "epsilon is missing", "such as 8"),
    command(
        "tune --model model --train good.jsonl --output new --epsilon 8 --try =1", "write a setting and its values"
    ),
    command("tune --model model --train good.jsonl --output new --epsilon 8 --try lora_r=a", "lora_r must be .*'a'"),
    command("doctor torn", "torn has no tokenizer that can be loaded", "put the tokenizer's files beside"),
    command("doctor narrow", r"narrow does not fit: its .*wte.weight is \[1536, 16\], not \[3, 16\]"),
    command("attack model --kind theft", "'theft' is not one of 'membership'"),
    command(
        "split certificates new --customer anna --days 9999999",
        "Invalid value for '--days': (9999999 is not in|Input should be)",
    ),
    command("attack model --limit 0", "Invalid value for '--limit': (0 is not in|Input should be)"),
    command("doctor ./absent", "no model folder", "absent"),
    command("quickstart --output earlier", "already holds", "--output"),
    command(f"calibrate --epsilon -1 {PLAN}", "epsilon"),
    command(f"calibrate --epsilon 8 {PLAN} --delta 2", "delta"),
    command("calibrate --epsilon 8 --examples 10 --batch-size 11 --epochs 1", "batch size 11 exceeds the 10 examples"),
    command(f"calibrate --epsilon 8 {PLAN} --epochs 0", "epochs must be a finite number above 0, not 0"),
    command(f"epsilon --noise-multiplier 1 {PLAN} --epochs inf", "epochs must be a finite number above 0, not inf"),
    command(f"epsilon --noise-multiplier 0 {PLAN}", "noise_multiplier must be greater than 0", "epsilon is infinite"),
    command(
        "plan --model model --train good.csv --encoding klingon --epsilon 8", "'klingon' is not known", "write utf-8"
    ),
    command("plan --model model --examples 0 --epsilon 8", "0 examples are too few to plan for", "at least 36"),
]

CASES = FILES + SETTINGS + OUTPUTS + MODELS + RESUMES + COMMANDS


def snapshot(*roots):
    """Every file below some folders, by content, and every folder."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for root in roots
        for path in Path(root).rglob("*")
        # A lock says who writes; it is there or not without meaning.
        if path.suffix != ".lock"
    }


def command_of(case, root):
    if case.command is not None:
        return list(case.command)
    resumes = "--resume" in case.flags
    changes = {**_settings(root), "epsilon": 8, "output": "stopped" if resumes else "new"}
    changes |= {"checkpoint_every": 1} if resumes else {}
    found = ["finetune", *([case.config] if case.config else [])]
    for name, value in (changes | case.changes).items():
        if value is not None:
            found += [f"--{name.replace('_', '-')}", str(value)]
    return [*found, *case.flags]


def sentence(result):
    """The one sentence of a refusal; of a wrong flag the last of what the command line's parser says."""
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    said = result.stderr.strip()
    if result.exit_code == 2:
        return " ".join(re.sub(r"[^\w\s.:'-]", " ", said).split())
    assert said.startswith("error: ")
    assert "\n" not in said
    assert len(said.split()) <= 26, said
    return said


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_a_sentence_and_costs_nothing(world, monkeypatch, case):
    monkeypatch.chdir(world)
    kept = world / "kept"
    shutil.copytree(world / "stopped", kept)
    try:
        if case.damage is not None:
            case.damage(world / "stopped")
        before = snapshot(world, os.environ["FASTDP_STATE"])
        said = sentence(CliRunner().invoke(app, command_of(case, world), env={"NO_COLOR": "1", "COLUMNS": "200"}))
        assert re.search(case.fault, said), said
        assert re.search(case.fix, said), said
        assert snapshot(world, os.environ["FASTDP_STATE"]) == before
    finally:
        shutil.rmtree(world / "stopped")
        kept.rename(world / "stopped")


class Full:
    """A disk on which some files find no room."""

    def __init__(self, monkeypatch, name):
        self.monkeypatch, self.name, self.sync = monkeypatch, name, files.sync

    def __enter__(self):
        def sync(path):
            if self.name in Path(path).name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            self.sync(path)

        self.monkeypatch.setattr(files, "sync", sync)

    def __exit__(self, *_):
        self.monkeypatch.setattr(files, "sync", self.sync)


def test_a_full_disk_and_an_interrupt_cost_no_more_than_their_step(world, monkeypatch):
    """One run that meets them all, one after the other, and comes to its end."""
    monkeypatch.chdir(world)
    command = command_of(Case("", "", "", {"output": "full", "checkpoint_every": 1}), world)

    def attempt(*more):
        return CliRunner().invoke(app, [*command, *more], env={"NO_COLOR": "1", "COLUMNS": "200"})

    before = snapshot(world, os.environ["FASTDP_STATE"])
    with Full(monkeypatch, "config.yaml"):
        assert re.search("no space left on device; make room", sentence(attempt()).lower())
    assert snapshot(world, os.environ["FASTDP_STATE"]) == before

    def interrupted(self, *_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fastdp.commands.training.ProgressReporter.step", interrupted)
        stopped = attempt()
    assert stopped.exit_code == 130
    assert "--resume" in stopped.stderr
    with Full(monkeypatch, "checkpoint.pt"):
        said = sentence(attempt("--resume"))
    assert re.search("[Nn]o space left on device; .*--resume", said)
    with small_files(20_000):
        said = sentence(attempt("--resume"))
    assert re.search("full/adapter cannot be written .*--resume", said)
    with Full(monkeypatch, "card.json"):
        assert re.search("[Nn]o space left on device; .*--resume", sentence(attempt("--resume")))
    left = {path.name for path in (world / "full").iterdir()}
    assert not {name for name in left if name.startswith(".") and not name.endswith(".lock")}, "nothing half made"
    assert "result.json" not in left
    done = attempt("--resume")
    assert done.exit_code == 0, done.output
    card = json.loads((world / "full" / "card.json").read_text())
    assert 0 < card["epsilon"]["upper_bound"] <= 8
    shutil.rmtree(world / "full")


@pytest.mark.parametrize("phase", ["reading data", "loading the model", "rehearsing a step"])
def test_an_interrupt_before_anything_is_released_leaves_nothing(world, monkeypatch, phase):
    monkeypatch.chdir(world)

    def reached(self, text):
        if text == phase:
            raise KeyboardInterrupt

    monkeypatch.setattr("fastdp.commands.training.ProgressReporter.phase", reached)
    before = snapshot(world, os.environ["FASTDP_STATE"])
    found = CliRunner().invoke(app, command_of(Case("", "", ""), world))
    assert found.exit_code == 130
    assert "nothing was spent" in " ".join(found.stderr.split())
    assert snapshot(world, os.environ["FASTDP_STATE"]) == before
