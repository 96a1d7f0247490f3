"""What the engine would do with a model: every trained parameter, its uses, its route and cost, or why it has none."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch

from fastdp.calls.batches import tensors
from fastdp.calls.modes import in_mode
from fastdp.engine.clip.policy import Policy
from fastdp.engine.engine import Engine
from fastdp.engine.loss.boundary import find_loss
from fastdp.engine.passes import ONE_EXAMPLE
from fastdp.engine.uses.layout import Ticket
from fastdp.ops.routes import constants_for, predicted_seconds
from fastdp.verify import Checks


class Description(NamedTuple):
    """One trained parameter; every field is text for a reader."""

    parameter: str
    uses: str
    route: str
    cost: str
    why: str


def describe(model: torch.nn.Module, batch: dict[str, Any]) -> list[Description]:
    """One forward and backward pass on ``batch`` (labels included), with the self-check, reported by parameter.

    The cost of a matrix is the predicted time of its norms over that of its own three products. Nothing is trained or
    released, and the model is left as it was.

    Raises ValueError if the model returns no loss.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = next(t.shape[0] for t in tensors(batch) if t.dim() > 0)
    tickets = deque([Ticket(torch.arange(rows), torch.ones(rows), is_last=True)])
    engine = Engine(model, Policy((1.0,), (0.0,), dict.fromkeys(parameters, 0)), tickets, verify=Checks)
    try:
        with in_mode(model, training=True):
            loss = find_loss(model(**batch))
            assert loss is not None
            loss.backward()
    finally:
        engine.close()
    return [_row(engine, name) for name in parameters]


def _row(engine: Engine, name: str) -> Description:
    assert engine.trace is not None
    reads = [read for read in engine.trace.reads if read.parameter == name]
    counts: dict[str, int] = {}
    for read in reads:
        counts[read.operation] = counts.get(read.operation, 0) + 1
    uses = ", ".join(op if count == 1 else f"{op} x{count}" for op, count in counts.items())
    if not reads:
        return Description(name, "none", "none", "none", "the forward pass never reads it: it keeps its value")
    if engine.route == ONE_EXAMPLE:
        return Description(name, uses, ONE_EXAMPLE, "a pass an example", engine.reason or "")
    route = engine.accumulator.routes.get(name)
    if route is None:
        return Description(name, uses, "none", "none", "no gradient reaches it on this batch")
    if route.columns == 1 or route.name in ("row sums", "masked"):
        return Description(name, uses, route.name, "one pass over its gradient", "")
    if route.name == "tiles":
        return Description(name, uses, route.name, "one product more, and no logits", "")
    length = max(1, route.tokens // route.units)
    seconds = predicted_seconds(route.name, route.rows, route.columns, length, route.units, keeps_factors=False)
    own = 6 * route.tokens * route.rows * route.columns / constants_for("cpu", torch.float32).product_flops
    return Description(name, uses, route.name, f"+{100 * seconds / own:.1f}% of its layer", "")
