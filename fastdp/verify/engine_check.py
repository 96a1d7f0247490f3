"""Engine check: the engine's norms and sums of a few rows against plain autograd, in the same shapes, with the same dropout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fastdp.calls.batches import Call
from fastdp.calls.modes import LowPrecisionDetector
from fastdp.calls.randomness import MasksInOrder, preserve_rng, repeatable
from fastdp.distributed.shards import norm, read_dtypes
from fastdp.engine.bounds import UpperNorms
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.policy import Policy
from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.loss.boundary import require_loss
from fastdp.engine.passes import Passes
from fastdp.engine.uses.layout import Ticket
from fastdp.engine.uses.use import uncast
from fastdp.verify.definition import coupling_error
from fastdp.verify.probe import Probe

#: How far norms and sums may be off, in float32 and in anything less.
_TOLERANCE, _LOW_PRECISION = 1e-3, 0.1


@dataclass(frozen=True)
class _KnownScales(Policy):
    """The method's groups with fixed scales for some units and 0 for others; records the norms."""

    known: Mapping[int, float] = field(default_factory=dict)
    seen: list[UpperNorms] = field(default_factory=list)

    def scales(self, upper: UpperNorms) -> torch.Tensor:
        self.seen.append(upper)
        squared = upper.measured
        known = torch.tensor([self.known.get(unit, 0.0) for unit in range(squared.shape[1])], device=squared.device)
        known = torch.where(torch.isfinite(squared).all(0), known, 0.0)
        return known.expand(squared.shape[0], -1).clone()


def check_engine(passes: Passes, call: Call, ticket: Ticket, rows: Sequence[int]) -> None:
    """Verify that norms and the weighted sum of two rows, or two packed units, are plain autograd's.

    Also verifies that a row's loss sends exact zeros to the inputs of all other rows. Raises `UnsupportedUse` if norms or sums
    differ, and `SelfCheckError` if a gradient reaches another row, or the backward pass draws random numbers of its own.
    """
    probe = Probe(passes, call, ticket)
    batch, small = call, ticket
    if not probe.packed:
        rows = list(rows[:2]) if len(rows) > 1 else [rows[0]] * 2
        batch, small = probe.rows(rows), Ticket(torch.arange(2), torch.ones(2), is_last=True)
    layout = small.layout(passes.device)
    most = 1 if not probe.packed and rows[0] == rows[1] else 2
    units = [unit for unit in range(layout.units) if float(layout.weights[unit]) > 0][:most]
    weights = {unit: 1 / (1 + unit) for unit in units}
    policy, kept, names = passes.accumulator.policy, passes.accumulator, list(passes.read)
    scales = _KnownScales(policy.bounds, policy.stds, policy.group_of, policy.masks, known=weights)
    passes.accumulator = Accumulator(passes.read, scales, passes.weights)
    passes.accumulator.tables = kept.tables
    dtypes, sizes = LowPrecisionDetector(), {unit: dict[str, float]() for unit in units}
    try:
        with uncast(passes.device), MasksInOrder():
            with preserve_rng(passes.model):
                _run_engine(passes, batch, small, dtypes)
            residual = passes.accumulator.sums

            def subtract(unit: int, index: int, gradient: torch.Tensor) -> None:
                """Take one parameter's gradient off the engine's sum as it arrives, so that one at a time is in memory."""
                name, found = names[index], passes.weights.measured(names[index], gradient)
                if name in sizes[unit]:
                    raise UnsupportedUse("a gradient comes in several parts: checkpoint with use_reentrant=False")
                sizes[unit][name] = found.norm
                if math.isfinite(found.norm) and name in residual:
                    residual[name].sub_(found.values, alpha=weights[unit])
                elif math.isfinite(found.norm):
                    residual[name] = found.values.float() * -weights[unit]

            inputs = probe.unit_gradients(batch, small.rows, units, subtract)
    finally:
        passes.accumulator = kept
    own = layout.token_segments if layout.token_segments is not None else layout.lane_units
    for unit, gradients in zip(units, inputs):
        alike = [g for g in gradients if g.shape[: own.dim()] == own.shape]
        if any(bool((g[own != unit].nan_to_num() != 0).any()) for g in alike):
            raise coupling_error(probe, call, 0 if probe.packed else rows[unit])
    low = dtypes.found or any(dtype.itemsize < 4 for dtype in read_dtypes(passes.model))
    measured = {unit: float(scales.seen[0].measured[:, unit].double().sum()) ** 0.5 for unit in units}
    rounding = {unit: float(scales.seen[0].norms[:, unit].norm()) - measured[unit] for unit in units}
    judge(measured, sizes, weights, residual, _LOW_PRECISION if low else _TOLERANCE, rounding)


def _run_engine(passes: Passes, call: Call, ticket: Ticket, dtypes: LowPrecisionDetector) -> None:
    """One forward and backward pass by the route of uses, into the accumulator."""
    with dtypes:
        output, _ = passes.run_forward(call, ticket, verify=True)
    losses = require_loss(output) if passes.returns_loss else None
    tops, seeds = passes.check_starts(output, ticket.rows, losses, scale=passes.scale(ticket))
    del output  # the logits beside a loss, before its backward pass, as in a step
    with repeatable(passes.model):
        torch.autograd.backward(tops, seeds)


def judge(
    measured: Mapping[int, float],
    sizes: Mapping[int, Mapping[str, float]],
    weights: Mapping[int, float],
    residual: Mapping[str, torch.Tensor],
    tolerance: float,
    rounding: Mapping[int, float],
) -> None:
    """Raise `UnsupportedUse` if a norm or the sum is off by more than ``rounding`` and ``tolerance`` of its size."""
    scale = {name: sum(weights[u] * own.get(name, 0.0) for u, own in sizes.items()) for name in residual}
    most = max(scale.values(), default=0.0)
    # Rounding is no fault: a gradient that vanishes is judged on the others' scale, and a record whose tokens cancel by its own.
    spare = sum(weights[unit] * hidden for unit, hidden in rounding.items())
    errors = {name: (norm(gap) - spare) / max(scale[name], 1e-4 * most, 1e-30) for name, gap in residual.items()}
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]), default="nothing")
    finite = True
    for unit, own in sizes.items():
        truth = math.hypot(*own.values())
        if not (math.isfinite(measured[unit]) or math.isfinite(truth)):
            finite = False  # an example that both find not to be finite takes no part
        elif not abs(measured[unit] - truth) <= tolerance * truth + rounding[unit] + 1e-12:
            raise UnsupportedUse(
                f"no rule fits how {worst} is read: an example's gradient norm is {measured[unit]:.6g} by the rules and "
                f"{truth:.6g} by autograd"
            )
    if finite and not errors.get(worst, 0.0) <= tolerance:
        raise UnsupportedUse(f"no rule fits how {worst} is read: its summed gradient is off by {errors[worst]:.2g}")
