"""Every command that README and docs show, and every settings file of the examples, as a newcomer pastes it.

By default each is read by the program's own parser, with its options. In the slow tier those of a page run in a shell, one after
the other, in a folder with small models and files under the names that pages use. Only sizes are cut, by `CUT`; `ELSEWHERE`
is all that does not run here, and says what runs it.
"""

import contextlib
import csv
import functools
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import click
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel
from typer.main import get_command

from fastdp.cli import app
from fastdp.commands.bench import SUITES
from fastdp.federated.bundle import app_folder
from fastdp.finetune.config import load_config
from fastdp.finetune.reporter import Forecast
from fastdp.quickstart.corpus import private_records
from tests.cases import cases

ROOT = Path(__file__).parent.parent
PAGES = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
EXAMPLES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("examples/*.yaml"))
SHELL = ("", "bash", "console")
#: Blocks of other kinds: Python runs in tests/test_snippets.py, settings are read below, and the rest is no input of any program.
OTHERS = {"python", "yaml", "text", "diff"}

#: Settings appended to commands that hold a phrase, and why. They say how much is done, never what.
CUT = {
    "fastdp quickstart": ("--records 256", "one batch; the default takes minutes"),
    "fastdp tune": ("--trials 2", "their number is drawn anew each time, and may be several times that"),
    "fastdp synthesize": (
        "--count 4",
        "two rows of labels get so many texts; tests/finetune/test_synthesis.py draws more",
    ),
    "fastdp bench attacks": ("--only padding", "tests/bench/test_attacks.py runs each of them"),
    "--wikitext wikitext2": ("--size tiny", "the suite's own size for a try"),
    "examples/ddp_e2e.py": ("--records 256 --epochs 1", "tests/private/test_ranks.py trains longer"),
    "examples/fsdp2_lora.py": ("--records 256 --epochs 1", "the same"),
    "fastdp split vendor": ("--address localhost:{port}", "a port that is free on this machine"),
    "fastdp split customer": ("--address localhost:{port}", "the same"),
}
#: What a reader puts in for a name that cannot be meant as it stands, by command.
STANDS_FOR = {
    "/data/": "{folder}/",
    # The Ray that `tests/federated/simulation.py` starts has one processor, for one client at a time.
    "num-supernodes=4": "num-supernodes=4 client-resources-num-cpus=1",
    "--model ...": "--model all-MiniLM-L6-v2",
    "--train ...": "--train train.tsv",
    "--certificates alice": "--certificates certificates/alice",
    "--certificates vendor": "--certificates certificates/vendor",
}
#: Commands that begin in a folder of their own, with an account that has released nothing, and why.
ANEW = {
    "examples/sap": "it releases the texts, which is done once",
    "examples/ewft": "the same",
    "fastdp privatize": "the same",
    "fastdp split certificates": "other machines than those of the block above",
}
#: What a page takes up that another page, or none, made.
TRAINED = "fastdp finetune examples/e2e_lora.yaml --model MODEL --train train.csv"
BEFORE = {
    "docs/audit.md": [f"{TRAINED} --epsilon 8 --output runs/e2e"],
    "docs/cards.md": [f"{TRAINED} --epsilon 8 --output run"],
    "docs/finetune.md": [f"{TRAINED} --epsilon 8 --output runs/a", f"{TRAINED} --epsilon inf --output runs/b"],
    **{f"examples/{name}.yaml": ["python examples/functions.py functions"] for name in ("alpaca", "columns", "people")},
}
#: Commands that do not run here: what runs them, a phrase of it, and why.
CHECKS, DEPLOYED = ".github/workflows/checks.yml", ("tests/federated/test_run.py", "def test_deployed_with_tls")
ELSEWHERE = {
    "pip install dist/": ("Makefile", "-c build/wheel/constraints.txt dist/", "needs a registry"),
    "pip install .": ("tests/test_packaging.py", "def test_wheel_works_outside_the_tree", "needs a registry"),
    "pip install -e '.[": ("Makefile", "-c $(VENV)/constraints.txt -e", "needs a registry"),
    "make test": (CHECKS, "make test #", "runs this file"),
    "make test-full": (CHECKS, "make test-full", "runs this file"),
    "make docs": (CHECKS, "make docs", "needs a registry"),
    "make ": (CHECKS, "make ${{ matrix.target }}", "needs a registry, or hours"),
    "fastdp verify items-card.json": ("tests/test_snippets.py", "items-card.json", "the page's Python makes the card"),
    "examples/chat.yaml": ("tests/finetune/test_chat.py", '"chat.yaml"', "needs a model with a chat template"),
    "fastdp federated server": (*DEPLOYED, "needs several machines"),
    "fastdp federated node": (*DEPLOYED, "needs several machines"),
    'federated app)" server': (*DEPLOYED, "needs several machines"),
}
SERVES = "fastdp split vendor"
#: The modules that launchers run.
LAUNCHERS = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}


def blocks(page):
    """Kind and text of each fenced block."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert {kind for kind, _ in found} <= OTHERS | {*SHELL}
    return found


def commands(page):
    """The command lines of a page, or of a settings file's first comment, without their comments."""
    if page.endswith(".yaml"):
        return re.findall(r"^#   (fastdp .*)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    lines = "\n".join(text for kind, text in blocks(page) if kind in SHELL).replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"(^|\s+)#\s.*", "", line) for line in lines) if line]


SHOWN = {page: found for page in PAGES if (found := list(dict.fromkeys(commands(page))))}
SHOWN |= {
    page: found for page in EXAMPLES if (found := [line for line in commands(page) if line not in SHOWN["README.md"]])
}


def of(table, line):
    """What a table says of a command: by the longest phrase that the command holds."""
    found = [phrase for phrase in table if phrase in line]
    return table[max(found, key=len)] if found else None


# By default: each is read.


@functools.cache
def fastdp_itself():
    return get_command(app)


def subcommand(words):
    """The command that words name, and its arguments."""
    command = fastdp_itself()
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def read_fastdp(words):
    command, words = subcommand(words)
    assert not hasattr(command, "commands"), f"no such command: {words}"
    with contextlib.suppress(click.exceptions.Exit):
        rest = command.make_context("fastdp", list(words)).args
        if rest:
            # Handed on to a suite, whose own parser tells them.
            suite = importlib.import_module(f"fastdp.bench.utility.{words[words.index('--suite') + 1]}")
            with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.suppress(SystemExit):
                suite.main(["--help"])
            assert {word for word in rest if word.startswith("--")} <= set(re.findall(r"--[\w-]+", told.getvalue()))


def read_make(words):
    # What it would do, in a tree that has nothing yet; that it needs neither files nor targets that are not there.
    subprocess.run(["make", "-n", "VENV=build/none", *words], cwd=ROOT, check=True, capture_output=True)


def read_python(words):
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1])
        return
    text = (ROOT / words[0]).read_text(encoding="utf-8")
    assert all(f'"{word}"' in text for word in words[1:] if word.startswith("--") and word != "--help")


def read_launcher(words):
    read_python(words[[word.endswith(".py") for word in words].index(True) :])


def read_pip(words):
    assert words[0] == "install"
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    asked = [extra for word in words for group in re.findall(r"\[(.*?)\]", word) for extra in group.split(",")]
    assert all(extra in extras for extra in asked)


def read_flower(words):
    """Flower may be absent."""
    assert {word for word in words if word.startswith("--")} <= {"--stream", "--run-config", "--federation-config"}


READ = {
    **{"fastdp": read_fastdp, "make": read_make, "python": read_python, "pip": read_pip},
    **{"torchrun": read_launcher, "accelerate": read_launcher},
    **{"flwr": read_flower, "export": lambda words: None},
}


@cases("line", dict.fromkeys(line for lines in SHOWN.values() for line in lines))
def test_a_command_is_read_by_its_program(line):
    program, *words = shlex.split(line)
    READ[program](words)


def spans():
    """Commands within sentences, which leave out what a reader knows."""
    texts = "".join(
        re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE) for page in PAGES
    )
    return sorted(set(re.findall(r"`((?:fastdp|make|pip|python) [^`]+)`", texts)))


@cases("line", spans())
def test_a_command_within_a_sentence_exists_with_its_options(line):
    program, *words = shlex.split(line.split("\\|")[0])
    if program != "fastdp":
        READ[program](words)
        return
    command, words = subcommand(words)
    assert not words or words[0].startswith("-") or not hasattr(command, "commands"), f"no such command: {words}"
    known = {option for parameter in command.params for option in parameter.opts}
    if "--suite" not in words:
        assert {word for word in words if word.startswith("--")} <= known | {"--help"}


@cases("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_a_suite_that_a_page_names_exists(page):
    assert {*re.findall(r"--suite (\w+)", (ROOT / page).read_text())} <= {*SUITES}


@pytest.mark.parametrize("page", [page for page in PAGES if any(kind == "yaml" for kind, _ in blocks(page))])
def test_settings_on_a_page_are_read(page, tmp_path):
    for kind, text in blocks(page):
        if kind == "yaml":
            (tmp_path / "settings.yaml").write_text(text)
            load_config(tmp_path / "settings.yaml")


def test_what_a_run_says_beforehand_is_what_the_page_shows():
    said = next(text for kind, text in blocks("docs/finetune.md") if kind == "text")
    assert " ".join(said.split()) == f"to come: {Forecast(198, 840.0, int(1.9 * 2**30), 8.0, 1e-6).in_words()}"


def test_what_is_said_of_commands_is_in_use():
    shown = [*(line for lines in SHOWN.values() for line in lines), TRAINED]
    for phrase in (*CUT, *STANDS_FOR, *ANEW, *ELSEWHERE):
        assert any(phrase in line for line in shown), phrase
    for path, phrase, _ in ELSEWHERE.values():
        assert phrase in (ROOT / path).read_text(encoding="utf-8"), phrase
    assert BEFORE.keys() <= SHOWN.keys()


# In the slow tier: each runs.


@pytest.fixture(scope="session")
def things(tmp_path_factory):
    """A folder with what pages name: models, and files of the real ones' shape."""
    folder = tmp_path_factory.mktemp("things")
    tokenizer = AutoTokenizer.from_pretrained(str(resources.files("fastdp.quickstart") / "model"))
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    for names, model in (
        (("MODEL", "gpt2-mini"), GPT2LMHeadModel(GPT2Config(**size, n_layer=7, n_embd=32, n_head=2, n_positions=192))),
        (
            ("MiniLM", "all-MiniLM-L6-v2"),
            BertForMaskedLM(
                BertConfig(**size, hidden_size=32, num_hidden_layers=6, num_attention_heads=2, intermediate_size=64)
            ),
        ),
    ):
        for name in names:
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)

    def table(name, header, rows):
        with open(folder / name, "w", newline="") as file:
            delimiter = "\t" if name.endswith(".tsv") else ","
            csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL).writerows([header, *rows])

    def labelled(records):
        return [(record.split(". Plan")[0], str(int("twice" in record))) for record in records]

    records = private_records(4096, seed=0)
    for name, part in (("train", records[:400]), ("test", records[400:500]), ("public_pairs", records[500:600])):
        pairs = [tuple(record.split(". ", 1)) for record in part]
        table(f"{name}.csv", ("mr", "ref"), pairs)
    for name, part in (("train", records[:64]), ("eval", records[64:96])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": record}) + "\n" for record in part))
    for name, part in (("train", records[:1200]), ("test", records[1200:1300]), ("dev", records[1300:3500])):
        table(f"{name}.tsv", ("sentence", "label"), labelled(part))
    table("reviews.csv", ("text", "label"), labelled(records[:200]))
    table("public.csv", ("text", "label"), labelled(records[200:1200]))
    names = [record[len("Patient: ") :].split(",")[0] for record in records]
    (folder / "labels.csv").write_text("label\n0\n1\n")
    (folder / "planted.txt").write_text("\n".join(names[:400]))
    (folder / "others.txt").write_text("\n".join(names[400:800]))
    spans = [
        {"entity_type": "PERSON", "entity_value": name, "start_position": 9, "end_position": 9 + len(name)}
        for name in names
    ]
    labelled_texts = [{"full_text": record, "spans": [span]} for record, span in zip(records[:200], spans)]
    (folder / "synth_dataset_v2.json").write_text(json.dumps(labelled_texts))
    (folder / "wikitext2").mkdir()
    for name, part in (("train", records[:400]), ("valid", records[400:800]), ("test", records[800:1200])):
        (folder / "wikitext2" / f"{name}.txt").write_text("\n".join(map(" ".join, zip(part, part[1:]))))
    return folder


class Reader:
    """Pastes commands into a shell, one after the other."""

    def __init__(self, folder, things):
        self.folder, self.things, self.servers = folder, things, list[subprocess.Popen[bytes]]()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "80"}
        # The reader's own account, which remembers what was released, and was not asked to forget it.
        self.environment.pop("FASTDP_AGAIN", None)
        self.begin()

    def begin(self):
        """A new folder of the reader's, in the source tree as far as commands name it."""
        self.stop()
        self.world = self.folder / f"world-{len(list(self.folder.iterdir()))}"
        shutil.copytree(self.things, self.world)
        for name in ("examples", "docs"):
            shutil.copytree(ROOT / name, self.world / name)
        self.environment["FASTDP_STATE"] = str(self.world / "state")

    def stop(self):
        while self.servers:
            server = self.servers.pop()
            server.terminate()
            server.wait(60)

    def paste(self, line):
        if of(ELSEWHERE, line):
            return
        if of(ANEW, line):
            self.begin()
        for shown, meant in STANDS_FOR.items():
            line = line.replace(shown, meant.format(folder=self.world))
        more, _ = of(CUT, line) or ("", "")
        line = f"{line} {more.format(port=self.port)}"
        words = shlex.split(line)
        if words[0] in LAUNCHERS and not shutil.which(words[0], path=str(Path(sys.executable).parent)):
            # Installed elsewhere than beside this Python, and for another one.
            line = line.replace(words[0], f"python -m {LAUNCHERS[words[0]]}", 1)
        if words[0] == "export":
            self.environment |= dict(word.split("=", 1) for word in words[1:])
        elif words[0] == "flwr":
            self.federate(words)
        elif SERVES in line:
            self.serve(line)
        else:
            done = subprocess.run(
                ["bash", "-c", line], cwd=self.world, env=self.environment, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            options = ("--output", "--json", "--write")
            for option, value in zip(words, words[1:]):
                assert option not in options or (self.world / value).exists(), f"{line} wrote no {value}"

    def serve(self, line):
        log = self.world / "server.log"
        with open(log, "wb") as file:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {line}"], cwd=self.world, env=self.environment, stdout=file, stderr=file
            )
        self.servers.append(server)
        end = time.monotonic() + 120
        while "serving" not in log.read_text():
            assert server.poll() is None, f"{line}\n{log.read_text()}"
            assert time.monotonic() < end, f"{line}\n{log.read_text()}"
            time.sleep(0.1)

    def federate(self, words):
        """With a SuperLink and a Ray that end with it; the words are Flower's."""
        pytest.importorskip("flwr")
        from tests.federated.simulation import Simulation

        federation = Simulation(self.world / "flower", environment=self.environment, start_seconds=300)
        with contextlib.chdir(self.world), federation:
            own = {"$(fastdp federated app)": str(app_folder())}
            said = federation.flwr(*(own.get(word, word) for word in words[1:]), timeout=900)
        assert (self.world / "run" / "run_card.json").exists(), said[-3000:]


@pytest.fixture
def reader(things, tmp_path):
    reader = Reader(tmp_path, things)
    yield reader
    reader.stop()


@pytest.mark.slow
@pytest.mark.parametrize("page", SHOWN)
def test_the_commands_of_a_page_run_in_their_order(page, reader):
    for line in [*BEFORE.get(page, ()), *SHOWN[page]]:
        reader.paste(line)
