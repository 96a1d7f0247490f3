"""Memory that one backward pass over a checkpointed model keeps for its sums, and how much of it there may be."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fastdp.calls.batches import Call, leaves
from fastdp.distributed.pieces import to_local
from fastdp.engine.capture.trace import LOOKUPS, Trace
from fastdp.ops.memory import free_bytes
from fastdp.ops.routes import plan_route

#: The share of free memory that factors may take: checkpoints and the activations of one block need the rest.
_SHARE = 0.75


def allowed_bytes(parameters: Mapping[str, torch.nn.Parameter], device: torch.device) -> int:
    """Bytes that factors may take in a run, whose sums and moments, of this process's pieces, may not be there yet."""
    later = sum(to_local(p).numel() * (4 + 2 * p.itemsize) for p in parameters.values())
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

    ``parameters`` are the trained ones as modules read them, and rows are ``longer`` than the traced ones: see `longest`.
    """
    kept, sources = 0.0, set()
    stacks = {read.parameter for read in trace.reads if read.operation == "grouped_mm"}
    half = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    for read in trace.reads:
        name, seen, parameter = read.parameter, read.input_shape, parameters[read.parameter]
        dtype = torch.get_autocast_dtype(device.type) if half else parameter.dtype
        # What has no rows is expanded to one copy a row.
        carries = trace.carries_rows.get((read.operation, name, len(seen))) is not None
        elements = rows * longer * math.prod(seen) / (trace.rows if carries else 1)
        if read.operation in LOOKUPS:
            kept += elements * (8 + parameter.shape[1] * dtype.itemsize)
            continue
        if name in stacks and not seen:
            continue
        # A convolution's input has its channels second, and is unfolded.
        spatial, whole = "conv" in read.operation and len(seen) > 2, parameter.dim() < 2 or not seen
        if not whole:
            columns = max(1, parameter.numel() // parameter.shape[0] if spatial else seen[-1])
            tokens, width = elements / max(1, seen[1] if spatial else columns), max(1, parameter.numel() // columns)
            if name in stacks:
                # Adapters of all experts are one matrix.
                width = width // len(parameter) if parameter.dim() > 2 else len(parameter)
            alone = trace.uses[name] == 1 and name not in trace.tables | stacks
            sizes = width, columns, max(1, round(tokens / units)), units
            whole = alone and plan_route(*sizes, dtype=dtype, device=device) == "instantiate"
        if whole:
            kept += 4 * units * parameter.numel()
        else:
            # Uses of one input (q, k and v; gate and up) keep it once.
            kept += tokens * (width + (0 if read.source in sources else columns)) * dtype.itemsize
            sources.add(read.source)
    return int(kept)
