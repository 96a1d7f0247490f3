"""Memory that is free on a device, and memory that one backward pass over a checkpointed model keeps for its sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

from fastdp.distributed.pieces import piece
from fastdp.engine.batches import Call, leaves
from fastdp.engine.trace import LOOKUPS, Trace
from fastdp.ops.routes import plan

#: Where a container finds what it may use.
_CONTAINER = Path("/sys/fs/cgroup")
#: The share of free memory that factors may take: checkpoints and the activations of one block need the rest.
_SHARE = 0.75


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still allocate: on a GPU with those that torch reserves and does not use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = psutil.virtual_memory().available
    try:
        # A container sees all of the machine's memory, and may use less of it.
        most, used = ((_CONTAINER / name).read_text() for name in ("memory.max", "memory.current"))
        return min(free, int(most) - int(used))
    except (OSError, ValueError):
        return free


def allowed_bytes(parameters: Mapping[str, torch.nn.Parameter], device: torch.device) -> int:
    """Bytes that factors may take throughout a run, asked for before its first step.

    Sums and an optimizer's two moments may not be there yet. Of weights in pieces those of this process count.
    """
    later = sum(piece(p).numel() * (4 + 2 * p.itemsize) for p in parameters.values())
    return int(_SHARE * (free_bytes(device) - later))


def longest(trace: Trace, call: Call, rows: int) -> float:
    """How much longer the rows of a call are than those of the traced one, by the input that grew most."""
    found = [t.numel() / rows / trace.sizes[path] for path, t in leaves(call) if trace.sizes.get(path)]
    return max(found, default=1.0)


def kept_bytes(
    trace: Trace,
    parameters: Mapping[str, torch.nn.Parameter],
    rows: int,
    units: int,
    longer: float,
    device: torch.device,
) -> int:
    """Bytes of factors, and of gradients by unit that take their place, until a single backward pass is over.

    Args:
        trace: of the model, by which every use and the shape of its input are known.
        parameters: the trained ones by name, as modules read them.
        rows, units: that the pass has.
        longer: times the traced rows' length, as `longest` gives it.
        device: of the activations.
    """
    kept, sources = 0.0, set()
    half = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    for read in trace.reads:
        shape, numbers = parameters[read.parameter].shape, parameters[read.parameter].numel()
        dtype = torch.get_autocast_dtype(device.type) if half else parameters[read.parameter].dtype
        if len(shape) < 2 or not read.input_shape:
            kept += 4 * units * numbers
            continue
        # What has no rows is expanded to one copy a row.
        carries = trace.carries_rows.get((read.operation, read.parameter, len(read.input_shape))) is not None
        elements = rows * longer * math.prod(read.input_shape) / (trace.rows if carries else 1)
        if read.operation in LOOKUPS:
            kept += elements * (8 + shape[1] * dtype.itemsize)
            continue
        # A convolution's input has its channels second, and is unfolded.
        spatial = "conv" in read.operation and len(read.input_shape) > 2
        columns = max(1, numbers // shape[0] if spatial else read.input_shape[-1])
        tokens = elements / max(1, read.input_shape[1] if spatial else columns)
        width, length = max(1, numbers // columns), max(1, round(tokens / units))
        if plan(width, columns, length, units, dtype=dtype, device=device) == "instantiate":
            kept += 4 * units * numbers
        else:
            # Uses of one input (q, k and v; gate and up) keep it once.
            kept += tokens * (width + (0 if read.source in sources else columns)) * dtype.itemsize
            sources.add(read.source)
    return int(kept)
