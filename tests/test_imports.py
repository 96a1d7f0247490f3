"""What is not imported: commands that need no torch start without it, and libraries come only when they are used."""

import json
import os
import subprocess
import sys

from tests.accounting.test_card import card_of_run
from tests.cases import cases

#: Each takes from .3 to 5 seconds to import.
SLOW = {"torch", "transformers", "peft", "opacus", "matplotlib", "grpc", "flwr", "pandas", "datasets"}
SLOW |= {"scipy", "dp_accounting"}
PLAN = ["--examples", "1000", "--batch-size", "100", "--epochs", "1"]


def imported(script, *arguments):
    """The slow ones among the modules that a fresh interpreter holds after a script."""
    listing = f"{script}\nimport sys, json\nprint('MODULES' + json.dumps(sorted(sys.modules)))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", listing, *arguments], capture_output=True, text=True, env=environment, check=True
    )
    modules = set(json.loads(done.stdout.rpartition("MODULES")[2]))
    assert "fastdp" in modules
    return modules & SLOW


def by_command(*arguments):
    return imported("import sys; from fastdp.cli import app; app(sys.argv[1:], standalone_mode=False)", *arguments)


@cases(
    "arguments",
    [
        ["--help"],
        ["finetune", "--help"],
        ["split", "--help"],
        ["epsilon", "--noise-multiplier", "2", *PLAN],
        ["calibrate", "--epsilon", "3", *PLAN],
    ],
)
def test_commands_that_need_no_torch(arguments):
    assert by_command(*arguments) == set()


def test_verify_needs_no_torch(tmp_path):
    card_of_run().save(tmp_path / "card.json")
    assert by_command("verify", str(tmp_path / "card.json")) == set()


def test_the_package_itself_is_all_but_empty():
    assert imported("import fastdp") == set()


def test_training_needs_torch_alone():
    names = "make_private, DPSGD, DPFrost, NonPrivate, AdaptiveClipping, NoiseStream, Private, accounting, ops"
    assert imported(f"from fastdp import {names}") <= {"torch"}


def test_events_are_those_of_dp_accounting():
    """Whichever is imported first: a class loaded twice would make an event unknown to the accountants."""
    for order in ("import fastdp.accounting as ours, dp_accounting", "import dp_accounting, fastdp.accounting as ours"):
        script = (
            f"{order}\n"
            "from dp_accounting import dp_event, pld\n"
            "event = ours.dpsgd(2.0, .1, 10)\n"
            "assert isinstance(event, dp_accounting.DpEvent) and isinstance(event, dp_event.SelfComposedDpEvent)\n"
            "assert dp_accounting.dp_event.DpEvent is dp_accounting.DpEvent\n"
            "theirs = pld.PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(1e-5)\n"
            "assert abs(theirs / ours.epsilon(event, 1e-5) - 1) < 5e-3\n"
            "import pickle; assert pickle.loads(pickle.dumps(event)) == event\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True)
