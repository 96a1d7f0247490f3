"""The first-step self-check: a few examples of the real batch, by the engine and by autograd one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fastdp.engine.accumulator import Accumulator
from fastdp.engine.batches import take_rows, take_tokens, tensors
from fastdp.engine.boundary import find_loss, plain_gradients
from fastdp.engine.bounds import UpperNorms
from fastdp.engine.layout import Ticket
from fastdp.engine.losses import LossTerms, combine, intercepted
from fastdp.engine.policy import Policy

if TYPE_CHECKING:
    from fastdp.engine.engine import Engine

_EXAMPLES = 3


class SelfCheckError(RuntimeError):
    """The engine's per-example gradients differ from autograd's; nothing was released."""


@dataclass(frozen=True)
class _Probe(Policy):
    """The method's groups with known scales, different for each unit, and a place to note the norms."""

    seen: list[torch.Tensor] = field(default_factory=list)

    def scales(self, upper: UpperNorms) -> torch.Tensor:
        squared = upper.measured
        self.seen.append(squared)
        units = squared.shape[1]
        steps = torch.arange(units, device=squared.device, dtype=torch.float32)
        known = torch.where(torch.isfinite(squared).all(0), 1 / (1 + steps), 0.0)
        return known.expand(squared.shape[0], -1).clone()


def compare(engine: Engine, args: Any, kwargs: Any, ticket: Ticket) -> None:
    """Raise `SelfCheckError` unless norms and a weighted sum of gradients agree with one-at-a-time autograd.

    Dropout is switched off meanwhile (it would differ between the two), autocast too, and the random state is restored.
    """
    singles, batch, small = _examples(args, kwargs, ticket)
    policy = engine.accumulator.policy
    probe = _Probe(policy.bounds, policy.stds, policy.group_of, policy.masks)
    kept = engine.accumulator
    device = next(iter(engine.parameters.values())).device
    cuda = [device.index or 0] if device.type == "cuda" else []
    engine.accumulator = Accumulator(engine.parameters, probe)
    try:
        with torch.random.fork_rng(devices=cuda), _steady(engine.model), torch.autocast(device.type, enabled=False):
            seeds = _by_engine(engine, batch, small)
            squared, sums = probe.seen[0], engine.accumulator.sums
            units = _real_units(small, squared.shape[1])
            found = _Comparison(sums)
            for index, (unit, single) in enumerate(zip(units, singles)):
                measured = float(squared[:, unit].double().sum()) ** 0.5
                found.add(measured, 1 / (1 + unit), _by_autograd(engine, single, seeds, index))
    finally:
        engine.accumulator = kept
    low = any(p.dtype != torch.float32 for p in engine.model.parameters() if p.is_floating_point())
    found.judge(tolerance=0.1 if low else 1e-3)


def attempt(engine: Engine, args: Any, kwargs: Any, ticket: Ticket) -> None:
    """A forward pass for nothing but to raise `UnsupportedUse` where an operation has no per-example rule."""
    device = next(iter(engine.parameters.values())).device
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
        engine.run_forward(args, kwargs, ticket, verify=True)


def _examples(args: Any, kwargs: Any, ticket: Ticket) -> tuple[list[tuple[Any, Any]], tuple[Any, Any], Ticket]:
    if ticket.token_units is not None:
        shape = (ticket.token_units.shape[0], ticket.token_units.shape[1])
        singles = []
        for unit in ticket.token_units.reshape(-1).unique_consecutive().tolist():
            if unit < 0:
                continue
            where = (ticket.token_units == unit).nonzero()
            row, start, end = int(where[0, 0]), int(where[0, 1]), int(where[-1, 1]) + 1
            if int(where[-1, 0]) != row:
                raise ValueError("a packed unit runs over the end of its row; keep each in one row")
            singles.append((take_tokens(args, row, start, end, shape), take_tokens(kwargs, row, start, end, shape)))
        return singles, (args, kwargs), ticket
    count = min(_EXAMPLES, max(2, ticket.rows))
    index = torch.arange(count) % ticket.rows
    batch = take_rows(args, index, ticket.rows), take_rows(kwargs, index, ticket.rows)
    singles = [
        (take_rows(args, index[i : i + 1], ticket.rows), take_rows(kwargs, index[i : i + 1], ticket.rows))
        for i in range(count)
    ]
    return singles, batch, Ticket(torch.arange(count), torch.ones(count), is_last=True)


def _by_engine(engine: Engine, call: tuple[Any, Any], ticket: Ticket) -> list[torch.Tensor]:
    output = engine.run_forward(*call, ticket, verify=True)
    if engine.loss_reduction is None:
        loss = find_loss(output)
        assert loss is not None
        loss.backward()
        return []
    found = [t for t in tensors(output) if t.requires_grad and t.dim() > 0]
    seeds = [torch.randn_like(t) for t in found]
    scale = ticket.rows if engine.loss_reduction == "mean" else 1
    torch.autograd.backward(found, [s / scale for s in seeds])
    return seeds


def _by_autograd(
    engine: Engine, call: tuple[Any, Any], seeds: list[torch.Tensor], index: int
) -> dict[str, torch.Tensor]:
    parameters = list(engine.parameters.values())
    device = parameters[0].device
    alone = Ticket(torch.zeros(1, dtype=torch.int64), torch.ones(1), is_last=True).layout(device)
    terms = LossTerms(alone)
    with intercepted(terms):
        args, kwargs = call
        output = engine.plain_forward(*args, **kwargs)
    if engine.loss_reduction is None:
        total = find_loss(output)
        assert total is not None
        loss = combine(total, terms, verify=True).sum()
        gradients = plain_gradients([loss], [torch.ones_like(loss)], parameters)
    else:
        found = [t for t in tensors(output) if t.requires_grad and t.dim() > 0]
        own = [s[index : index + 1] for s in seeds]
        gradients = plain_gradients(found, own, parameters)
    return {name: g.float() for name, g in zip(engine.parameters, gradients) if g is not None}


def _real_units(ticket: Ticket, units: int) -> list[int]:
    """The kernel's units that are examples: packed rows hold segments of padding between them."""
    if ticket.token_units is None:
        return list(range(units))
    weights = ticket.layout(torch.device("cpu")).weights
    return [unit for unit in range(units) if float(weights[unit]) > 0]


class _Comparison:
    """The engine's sums less autograd's gradients, example by example, so that one gradient at a time is in memory."""

    def __init__(self, sums: dict[str, torch.Tensor]):
        self.residual = sums
        self.scale = dict.fromkeys(sums, 0.0)
        self.norms: list[tuple[float, float]] = []

    def add(self, measured: float, weight: float, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take one example: its norm by the engine, its weight in the sum, and its gradient by autograd."""
        sizes = {name: float(g.double().norm()) for name, g in gradients.items()}
        truth = math.sqrt(sum(size**2 for size in sizes.values()))
        if not math.isfinite(measured) and not math.isfinite(truth):
            # An example that both find not to be finite takes no part; it is not held against the others.
            return
        self.norms.append((measured, truth))
        for name, gradient in gradients.items():
            self.scale[name] = self.scale.get(name, 0.0) + weight * sizes[name]
            if name in self.residual:
                self.residual[name].sub_(gradient, alpha=weight)
            else:
                self.residual[name] = gradient * -weight

    def judge(self, *, tolerance: float) -> None:
        """Raise `SelfCheckError` if a norm or a sum is off by more than ``tolerance`` of its size."""
        if not self.norms:
            raise SelfCheckError(
                "no example of the first batch that was looked at has a finite gradient, so the engine cannot be checked; "
                "nothing was released"
            )
        worst, error = self._worst()
        for measured, truth in self.norms:
            if not (math.isfinite(measured) and abs(measured - truth) <= tolerance * truth + 1e-12):
                raise SelfCheckError(
                    f"the gradient norm of an example is {measured:.6g} by the engine and {truth:.6g} by autograd on that "
                    f"example alone; the model couples examples, or {worst} is read in a way the engine does not know; "
                    "nothing was released"
                )
        if not error <= tolerance:
            raise SelfCheckError(
                f"the summed gradient of {worst} differs from autograd's by {error:.2g} of its size; nothing was released"
            )

    def _worst(self) -> tuple[str, float]:
        most = max(self.scale.values(), default=0.0)
        errors = {
            # A gradient that vanishes next to the others is rounding noise: it is judged on their scale.
            name: float(gap.double().norm()) / max(self.scale.get(name, 0.0), 1e-4 * most, 1e-30)
            for name, gap in self.residual.items()
        }
        # A gap that is NaN is the worst of all.
        return max(errors.items(), key=lambda pair: (math.isnan(pair[1]), pair[1]), default=("nothing", 0.0))


@contextmanager
def _steady(model: torch.nn.Module) -> Iterator[None]:
    """Every dropout rate of the model at 0, gradient checkpointing as it is."""
    changed: list[tuple[Any, str, float]] = []
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            is_rate = "drop" in attribute or (
                attribute == "p" and isinstance(module, torch.nn.modules.dropout._DropoutNd)
            )
            if is_rate and isinstance(value, float) and value:
                changed.append((module, attribute, value))
                setattr(module, attribute, 0.0)
    try:
        yield
    finally:
        for module, attribute, value in changed:
            setattr(module, attribute, value)
