"""A training run that is killed between lines and resumed until its budget is spent; a scenario of `ranked.py`.

The parent runs no backward pass (autograd does not survive a fork) and forks one child an attempt. A child kills itself with
SIGKILL before a random line of the files that keep the books.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it, which would take each child two seconds

import fastdp
from fastdp.accounting import BudgetExceeded, Ledger, LedgerError, journal, ledger
from fastdp.private import release as releases, run, sampler
from tests.engine.runs import Classifier, start

WATCHED = {module.__file__ for module in (run, releases, sampler, ledger, journal)}


def observe_noise(log: Path) -> None:
    """Write the noise of each release's first tensor before anyone can use it, past any buffer."""
    add = fastdp.ops.add_noise_group_

    def observed(xs: Any, *rest: Any, **options: Any) -> None:
        before = xs[0].clone()
        add(xs, *rest, **options)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, (json.dumps((xs[0] - before).reshape(-1)[:4].tolist()) + "\n").encode())
        os.close(descriptor)

    fastdp.ops.add_noise_group_ = observed


def die_at(line: int) -> None:
    """Arrange for SIGKILL before the ``line``-th line of the watched files is run."""
    left = line

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line":
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return watch

    sys.settrace(watch)


def train(folder: Path, budget: int) -> None:
    """Train until the budget is spent, with a checkpoint after every other step; continue from the last one."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = start(
        model,
        optimizer=optimizer,
        noise_multiplier=1.0,
        target_delta=1e-4,
        epochs=budget / 3,
        max_physical_batch_size=6,
        output_dir=folder,
        resume=(folder / "ledger.jsonl").exists(),
        unsafe_seed=None,
        # Each call of a function takes long under a trace, and checks make many.
        self_check=False,
    )
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        private.load_state_dict(saved["private"])
    try:
        while True:
            for batch in private.data_loader:
                model(**batch)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
                if private.last_step_done and private.steps_done % 2 == 0:
                    torch.save({"model": model.state_dict(), "private": private.state_dict()}, folder / "new")
                    os.replace(folder / "new", checkpoint)
    except BudgetExceeded:
        private.detach()


def attempt(folder: Path, budget: int, kill_at: int) -> int:
    """One child; its exit status, negative if it was killed."""
    child = os.fork()
    if child == 0:
        try:
            observe_noise(folder / "noise")
            die_at(kill_at)
            train(folder, budget)
        except BaseException as error:
            sys.settrace(None)
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def crashed(folder: Path, seed: int, budget: int) -> dict[str, Any]:
    """Kill and resume until a run ends by itself: what was seen after each attempt, and the noise of every release."""
    chance, noise = random.Random(seed), folder / "noise"
    observations = []
    for _ in range(200):
        # Sometimes within the first lines of a run, where files are created and read; mostly within a few steps.
        longest = max(1500, 100 * budget)
        status = attempt(folder, budget, chance.choice((60, 400, longest, longest)) * chance.randint(1, 100) // 100 + 1)
        released = len(noise.read_text().splitlines()) if noise.exists() else 0
        path = folder / "ledger.jsonl"
        try:
            spent = Ledger.read(path).spent_steps if path.exists() else 0
        except LedgerError:
            # Killed while it was created: the message says to delete it, which loses nothing.
            spent = 0
            path.unlink()
        observations.append({"status": status, "released": released, "spent": spent})
        if status >= 0:
            break
    return {"observations": observations, "noise": [json.loads(line) for line in noise.read_text().splitlines()]}
