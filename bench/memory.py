"""Peak memory of a call, its inputs not counted; on a processor in a process of its own.

In a process that has run other things a call takes up what they left behind, and seems to need nothing. The process
is started with a C library that gives every block of 64 KiB and more back to the system when it is freed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
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
