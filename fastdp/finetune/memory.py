"""What a run takes: its memory, and a rehearsal that foretells memory and time before anything is spent."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from fastdp.calls.modes import in_mode
from fastdp.data import IGNORED, Collator, Examples
from fastdp.finetune.config import ConfigError, FinetuneConfig
from fastdp.finetune.evaluation import autocast

#: Bytes that a private step with Adam keeps for each trained parameter, and an ordinary backward pass does not: two moments and
#: the clipped sum, in float32.
_OPTIMIZER_BYTES = 12


class PeakMemory:
    """Measure the peak of memory since this was made: on a GPU what torch allocated, otherwise the process's resident set.

    Where a process's high-water mark cannot be reset, as outside Linux, it is the peak since the process began.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def so_far(self) -> int:
        """Peak bytes since the beginning."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            status = Path("/proc/self/status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        except (OSError, StopIteration):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak * 1024


def rehearse_step(
    model: nn.Module, examples: Examples, collator: Collator, config: FinetuneConfig
) -> tuple[float, int]:
    """Seconds of a logical step and peak bytes, predicted from ordinary passes over the longest examples and the middle ones.

    Nothing is trained or kept, and random states are put back. The figures depend on private lengths: like the loss, they are
    for whoever runs the training.

    Raises:
        ConfigError: if the longest examples do not fit into the memory of the device, or the model's loss is not finite.
    """
    device = next(model.parameters()).device
    order = sorted(range(len(examples)), key=lambda index: examples.lengths[index])
    count = min(config.physical_batch_size, len(order))
    middle = max(0, (len(order) - count) // 2)
    peak = PeakMemory(device)
    with torch.random.fork_rng():
        try:
            _pass(model, [examples[index] for index in order[-count:]], collator, config)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"{count} examples of up to {examples.lengths[order[-1]]} tokens do not fit into the memory of "
                f"{device}. Lower physical_batch_size or max_length, or set gradient_checkpointing."
            ) from None
        begin = time.perf_counter()
        _pass(model, [examples[index] for index in order[middle : middle + count]], collator, config)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
    trained = 0 if config.is_zeroth_order else sum(p.numel() for p in model.parameters() if p.requires_grad)
    return seconds * max(1.0, config.batch_size / count), peak.so_far() + _OPTIMIZER_BYTES * trained


def _pass(model: nn.Module, items: Sequence[dict], collator: Collator, config: FinetuneConfig) -> None:
    """Run one microbatch as training will, without an update."""
    device = next(model.parameters()).device
    # DP-ZO is for models whose backward pass does not fit: its step is two passes forward.
    with in_mode(model, training=True), torch.set_grad_enabled(not config.is_zeroth_order):
        try:
            batch = {key: value.to(device) for key, value in collator(items).items()}
            with autocast(device, config.precision):
                loss = model(**batch).loss
            if config.task == "causal-lm" and bool((batch["labels"][:, 1:] == IGNORED).all()):
                raise ConfigError(f"max_length {config.max_length} leaves no token to predict: raise it")
            if not math.isfinite(value := loss.item()):
                raise ConfigError(
                    f"{config.model} has a loss of {value} before any training: its weights are damaged, or overflow in "
                    f"{config.precision}; load another copy, or set precision: float32"
                )
            if config.is_zeroth_order:
                model(**batch)
            else:
                loss.backward()
        finally:
            model.zero_grad(set_to_none=True)
