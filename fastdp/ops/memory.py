"""Memory that a device has left."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

#: Where a container finds what it may use.
_CONTAINER = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still allocate: on a GPU with those that torch reserves and does not use."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = psutil.virtual_memory().available
    try:
        # A container sees all of the machine's memory, and may use less of it.
        most, used = ((_CONTAINER / name).read_text() for name in ("memory.max", "memory.current"))
        return min(free, int(most) - int(used))
    except (OSError, ValueError):
        return free
