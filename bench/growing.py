"""How time and memory of a step grow with its sizes and with the number of processes, private and ordinary.

    python -m fastdp.bench.growing results/cpu/growing.json growing.png

Every point is measured in processes of its own, forked from one that has imported everything; each has one thread. Memory is
that of processes whose C library gives freed blocks back; times are of others, whose library keeps them: how much of a heap
it gives back by itself, to be filled with zeros by the system again, is a matter of chance. The shares
of a step that noise and ledger take are measured too, and what two processes take of one's time.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # an optimizer imports it, which would take each child two seconds
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import fastdp
from fastdp.engine.accumulator import Accumulator
from fastdp.private.observer import Observer

from .memory import ENVIRONMENT, forked, growth
from .plots import picture, plain_log
from .record import write
from .workloads import Case, build


@dataclass(frozen=True)
class Setting:
    """A step of a small Llama.

    Args:
        batch: examples of a logical batch, ``together`` of them at most in one pass of one process.
        tokens: of an example.
        words: of the vocabulary.
    """

    batch: int = 4
    together: int = 4
    tokens: int = 128
    width: int = 256
    words: int = 8192
    layers: int = 4
    ranks: int = 1

    def model(self) -> Any:
        """The model, alike in every process."""
        case = Case("llama", self.layers, self.width, heads=4, vocabulary=self.words, tokens=self.tokens)
        model: Any = build(case, torch.device("cpu"))
        model.config.use_cache = False
        return model


BASE = Setting()
#: What is changed of the base, by axis.
SWEEPS: dict[str, list[Setting]] = {
    "batch": [replace(BASE, batch=n, together=n) for n in (2, 4, 8, 16, 32)],
    "tokens": [replace(BASE, tokens=n) for n in (64, 128, 256, 512)],
    "width": [replace(BASE, width=n) for n in (128, 256, 384, 512)],
    "words": [replace(BASE, words=n) for n in (2048, 8192, 16384, 32768)],
    "ranks": [replace(BASE, batch=32, together=32, ranks=n) for n in (1, 2, 4)],
}
#: Ways of training; the last two leave a piece of every weight on each process.
WAYS = ("ordinary", "private", "ordinary, pieces", "private, pieces")


class Released(Observer):
    """Times from the merged sum of a batch to its noisy gradients: ledger and noise."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._began = 0.0

    def before_release(self, accumulator: Accumulator) -> None:
        self._began = time.perf_counter()

    def after_release(self, accumulator: Accumulator) -> None:
        self.times.append(time.perf_counter() - self._began)


def _ordinary(model: Any, optimizer: torch.optim.Optimizer, setting: Setting) -> Callable[[], None]:
    ids = torch.randint(setting.words, (setting.batch // setting.ranks, setting.tokens))
    parts = ids.split(setting.together)

    def step() -> None:
        for part in parts:
            (model(input_ids=part, labels=part).loss / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _private(
    model: Any, optimizer: torch.optim.Optimizer, setting: Setting, folder: Path
) -> tuple[Callable[[], None], Released]:
    rows = [{"input_ids": torch.randint(setting.words, (setting.tokens,))} for _ in range(8 * setting.batch)]

    def collate(items: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ids = torch.stack([item["input_ids"] for item in items])
        return {"input_ids": ids, "labels": ids}

    private = fastdp.make_private(
        model,
        optimizer,
        DataLoader(rows, batch_size=setting.batch, collate_fn=collate),  # type: ignore[arg-type]
        noise_multiplier=1.0,
        target_delta=1e-3,
        epochs=8,
        max_physical_batch_size=setting.together,
        sampling="shuffled",  # every batch is of the same size
        self_check=False,
        output_dir=folder,
    )
    released = Released()
    private.observe(released)

    def endless() -> Iterator[Any]:
        while True:
            yield from private.data_loader

    batches = endless()

    def step() -> None:
        while True:
            private.model(**next(batches)).loss.backward()
            private.optimizer.step()
            private.optimizer.zero_grad()
            if private.last_step_done:
                return

    return step, released


def _keep_freed_blocks() -> None:
    """Let the C library of this process keep what it can of its heap: mallopt's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""
    library = ctypes.CDLL(None)
    if not (library.mallopt(-1, 2**31 - 1) and library.mallopt(-3, 2**25)):
        raise RuntimeError("the C library does not take its settings")


def _measure(setting: Setting, way: str, steps: int, folder: Path) -> dict[str, float]:
    """One process's figures: seconds of a step, of its release, and bytes at its peak with model and optimizer."""
    took: list[float] = []
    released: Released | None = None

    def run() -> None:
        nonlocal released
        model = setting.model()
        if way.endswith("pieces"):
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        elif way == "ordinary" and setting.ranks > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if way.startswith("ordinary"):
            step = _ordinary(model, optimizer, setting)
        else:
            step, released = _private(model, optimizer, setting, folder)
        for _ in range(2 + steps):
            if setting.ranks > 1:
                dist.barrier()
            began = time.perf_counter()
            step()
            took.append(time.perf_counter() - began)

    peak = growth(run)
    found = {"seconds": statistics.median(took[2:]), "bytes": float(peak or 0)}
    return found if released is None else {**found, "release": statistics.median(released.times[2:])}


def measured(setting: Setting, way: str, steps: int) -> dict[str, float]:
    """The first process's times, and the most bytes of any, in groups that are forked for them."""
    timed = _group(setting, way, steps, keeping=True)[0]
    return {**timed, "bytes": max(found["bytes"] for found in _group(setting, way, 1, keeping=False))}


def _group(setting: Setting, way: str, steps: int, keeping: bool) -> list[dict[str, float]]:
    """The figures of each process of a group, with a C library that keeps freed blocks or gives them back.

    Raises:
        RuntimeError: a process failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def measure(rank: int) -> None:
            if keeping:
                _keep_freed_blocks()
            if setting.ranks > 1 or way.endswith("pieces"):
                meeting = f"file://{folder / 'meeting'}"
                dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=setting.ranks)
            # A process's first step also takes what libraries load, and keep, when they are first used.
            first = replace(setting, batch=setting.ranks, tokens=4, width=16, words=64, layers=1)
            _measure(first, way, 1, folder / "first")
            (folder / f"{rank}.json").write_text(json.dumps(_measure(setting, way, steps, folder / "run")))

        children = [forked(partial(measure, rank)) for rank in range(setting.ranks)]
        # All of them are waited for, whichever failed.
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            raise RuntimeError(f"{way} failed at {setting}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(setting.ranks)]


def figures(steps: int) -> list[dict[str, Any]]:
    """Every point of every axis; pieces with several processes alone."""
    found, known = [], {}
    for axis, settings in SWEEPS.items():
        for setting, way in itertools.product(settings, WAYS if axis == "ranks" else WAYS[:2]):
            if (setting, way) not in known:
                known[setting, way] = measured(setting, way, steps)
            point = {"axis": axis, "at": getattr(setting, axis), "way": way, **known[setting, way]}
            print(json.dumps(point), flush=True)
            found.append({**point, "setting": asdict(setting)})
    return found


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """p of the power law x^p that fits best, by least squares of logarithms."""
    x, y = np.log(np.array(points)).T
    return float(np.polyfit(x, y, 1)[0])


def summary(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Exponents by axis and way; what noise and ledger take of private steps; what two processes take of half of one's step."""
    exponents: dict[str, dict[str, dict[str, float]]] = {}
    for axis, way in {(point["axis"], point["way"]): None for point in points}:
        own = [point for point in points if (point["axis"], point["way"]) == (axis, way)]
        exponents.setdefault(axis, {})[way] = {
            of: round(exponent([(point["at"], point[of]) for point in own]), 3) for of in ("seconds", "bytes")
        }
    steps = {(p["at"], p["way"]): p["seconds"] for p in points if p["axis"] == "ranks"}
    return {
        "exponents": exponents,
        "share of noise and ledger by batch": {
            p["at"]: p["release"] / p["seconds"] for p in points if p["axis"] == "batch" and "release" in p
        },
        "two processes over half of one": {way: 2 * steps[2, way] / steps[1, way] for way in WAYS},
    }


def draw(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds above, bytes below, a column an axis; legends give the exponents."""
    found = summary(points)["exponents"]
    with picture(path, columns=len(SWEEPS), rows=2, legends=1) as panels:
        for panel, (of, axis) in zip(panels, itertools.product(("seconds", "bytes"), SWEEPS)):
            for way, powers in found[axis].items():
                own = [p for p in points if (p["axis"], p["way"]) == (axis, way)]
                scale = 1.0 if of == "seconds" else 2.0**-20
                panel.plot([p["at"] for p in own], [p[of] * scale for p in own], label=f"{way}: power {powers[of]:.2f}")
            panel.set(
                xscale="log", yscale="log", xlabel=axis, title="seconds" if of == "seconds" else "MiB at the peak"
            )
            panel.set_xticks([getattr(setting, axis) for setting in SWEEPS[axis]])
            plain_log(panel.yaxis)
            panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            panel.minorticks_off()


def main(results: str, drawn: str, steps: str = "3") -> None:
    """Measure, write the results and draw them."""
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(
            sys.executable,
            [sys.executable, "-m", "fastdp.bench.growing", results, drawn, steps],
            {**os.environ, **ENVIRONMENT},
        )
    torch.set_num_threads(1)
    points = figures(int(steps))
    write(results, {**summary(points), "points": points})
    draw(points, Path(drawn))


if __name__ == "__main__":
    main(*sys.argv[1:])
