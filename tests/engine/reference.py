"""The definition that the engine is compared with: autograd, one example at a time, in float64."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from fastdp.bench.fuzz import alone, norms

from fastdp.engine.bounds import Errors, Norms, UpperNorms
from fastdp.engine.clip.policy import Policy
from fastdp.engine.engine import Engine
from fastdp.engine.uses.layout import Ticket
from fastdp.verify import Checks


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The error of ``a`` relative to the norm of ``b``."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def require_exact(
    engine: Engine, units: list[dict[str, torch.Tensor]], tolerance: float = 1e-5, route: str = "uses"
) -> None:
    """Of a step: units' norms, whose parts are as long as the bound at most, and the sum by the scales they gave."""
    assert engine.route == route, engine.reason
    passes = slice(-len(units), None) if route == "one-example" else slice(-1, None)
    seen, scales = (torch.cat([r[0] for r in own[passes]]).double() for own in (Recording.seen, Recording.given))
    sizes, bound = norms(units), engine.accumulator.policy.bounds[0]
    assert relative(seen, sizes) < tolerance
    assert bool((scales * sizes <= bound * (1 + 1e-9)).all())
    # A unit may get a little less than its share, because its norm is replaced by an upper bound.
    assert bool(((1 - 2e-3) * (bound / sizes).clamp(max=1) <= scales).all())
    wanted = {name: sum(s * unit[name].double() for s, unit in zip(scales, units)) for name in units[0]}
    least = 1e-3 * max(float(total.norm()) for total in wanted.values())  # type: ignore[union-attr]
    for name, total in wanted.items():
        gap = engine.accumulator.sums.get(name, torch.zeros(())).double() - total
        assert float(gap.norm()) < tolerance * max(least, float(total.norm())), name  # type: ignore[union-attr]


class Recording(Policy):
    """Flat clipping that remembers the norms it saw, as computed, and the scales that their bounds gave."""

    seen: list[torch.Tensor] = []
    given: list[torch.Tensor] = []

    def scales(self, upper: UpperNorms) -> torch.Tensor:
        Recording.seen.append(upper.measured.sqrt())
        Recording.given.append(super().scales(upper))
        return Recording.given[-1]


def known(powers: torch.Tensor, order: int = 2) -> UpperNorms:
    """Bounds of norms that are known exactly, from their squares (or themselves) ``[groups, units]``."""
    norms = Norms(powers.shape[0], powers.shape[1], powers.device, order)
    for group, row in enumerate(powers):
        norms.add(group, row, Errors(1, 0.0))
    return norms.upper()


def engine_for(model: torch.nn.Module, bound: float, **options: object) -> tuple[Engine, deque[Ticket]]:
    """An engine with flat clipping at ``bound``, which verifies its batches by default, and the queue that feeds it."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    Recording.seen, Recording.given = [], []
    tickets: deque[Ticket] = deque()
    policy = Recording((bound,), (0.0,), dict.fromkeys(names, 0))
    return Engine(model, policy, tickets, **{"verify": Checks, **options}), tickets  # type: ignore[arg-type]


def ticket(rows: int, *, last: bool = True) -> Ticket:
    """A micro-batch in which every row is a unit."""
    return Ticket(torch.arange(rows), torch.ones(rows), last)


def feed(engine: Engine, tickets: deque[Ticket], batch: Mapping[str, Any], units: Ticket | None = None) -> None:
    """One micro-batch through an engine, by whichever route; what came before it is forgotten."""
    engine.abandon()
    tickets.append(units or ticket(len(next(iter(batch.values())))))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="this model takes the one-example route")
        engine.model(**batch)["loss"].backward()


def stepped(
    model: torch.nn.Module, batch: Mapping[str, Any], bound: float, units: Ticket | None = None, **options: object
) -> Engine:
    """An engine after one micro-batch of a model that returns its loss."""
    engine, tickets = engine_for(model, bound, **options)
    feed(engine, tickets, batch, units)
    return engine


def assert_exact_step(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    units: list[dict[str, torch.Tensor]] | None = None,
    given: Ticket | None = None,
    route: str = "uses",
    **options: object,
) -> Engine:
    """The same, clipped at the median norm: exact against the gradients of ``units``, by default of each row alone."""
    units = alone(copy.deepcopy(model).double(), dict(batch)) if units is None else units
    engine = stepped(model, batch, float(norms(units).median()), given, **options)
    require_exact(engine, units, route=route)
    return engine
