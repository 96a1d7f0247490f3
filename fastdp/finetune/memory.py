"""The peak memory of a stretch of a run: on a GPU what torch allocated, otherwise the process's resident set."""

from __future__ import annotations

import sys
from pathlib import Path

import torch


class PeakMemory:
    """Begins measuring when made; `stop` gives the peak in bytes since then.

    Linux can reset a process's high-water mark; where it cannot be reset, the peak since the process began is given.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return

    def stop(self) -> int:
        """Peak bytes since the beginning."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            status = Path("/proc/self/status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        except (OSError, StopIteration):
            import resource

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak * 1024
