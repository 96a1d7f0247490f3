"""Peak memory of a call, its inputs not counted; on a processor in a process of its own.

In a process that has run other things a call takes up what they left behind, and seems to need nothing. The process
is started with a C library that gives every block of 64 KiB and more back to the system when it is freed.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

#: Makes the C library give every larger block back when it is freed, instead of keeping it in its heap.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def process(environment: Mapping[str, str]) -> ProcessPoolExecutor:
    """One process of its own, with these variables besides ours; what functions leave in their modules stays there."""
    made = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with mock.patch.dict(os.environ, environment):
        made.submit(os.getpid).result()
    return made


def growth(function: Callable[[], Any]) -> int | None:
    """Bytes of resident memory that a call takes above its start, result included; None where the system does not tell."""
    gc.collect()
    try:
        # Linux: 5 sets the process's high-water mark back to what it holds now.
        Path("/proc/self/clear_refs").write_text("5")
        before = held("VmRSS")
        kept = function()
        del kept
        return max(0, held("VmHWM") - before)
    except OSError:
        return None


def held(key: str) -> int:
    """Bytes that this process holds (``VmRSS``), or held at most (``VmHWM``); OSError where the system does not tell."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def on_gpu(function: Callable[[], Any]) -> int:
    """Bytes that a call takes on the current CUDA device above its start, result included."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = function()
    del kept
    return torch.cuda.max_memory_allocated() - before


def of_cases(sizes: str, only: str | None) -> dict[str, dict[str, Any]]:
    """Of each case of ``bench.kernels`` on a processor: ``peak_bytes``, and ``first_peak_bytes`` of a process's first call.

    A case that raises has ``failed`` instead. The first call also counts what libraries load, and keep, when they are first used.

    Raises:
        RuntimeError: a process failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "fastdp.bench.memory", sizes, only or ""],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"peak memory was not measured: {(done.stderr.strip().splitlines() or ['killed'])[-1]}")
    return {figures.pop("op"): figures for figures in map(json.loads, done.stdout.splitlines())}


def forked(work: Callable[[], None], threads: int = 1) -> int:
    """A child of this process that does some work, and says by its exit status whether it failed; its id."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(threads)
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def measure_growth(op: str, sizes: str) -> None:
    """Print the peaks of one case."""
    from .kernels import SIZES, cases

    case = next(case for case in cases(torch.device("cpu"), SIZES[sizes], op) if case.op == op)
    with torch.no_grad():
        first, later = growth(case.run), growth(case.run)
    print(json.dumps({"op": op, "first_peak_bytes": first, "peak_bytes": later}), flush=True)


def measure_growths(sizes: str, only: str) -> None:
    """Each case in a child: what takes seconds to import is imported once, and no thread runs before the children part."""
    from .kernels import names

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for op in names(only):
        if os.waitpid(forked(partial(measure_growth, op, sizes), threads), 0)[1]:
            print(json.dumps({"op": op, "failed": "its run for peak memory ended with an error"}), flush=True)


if __name__ == "__main__":
    measure_growths(*sys.argv[1:])
