"""Engine check: the engine's norms and sums of a few rows against plain autograd, in the same shapes, with the same dropout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastdp.engine.accumulator import Accumulator
from fastdp.engine.batches import Call
from fastdp.engine.boundary import differentiable, require_loss
from fastdp.engine.bounds import UpperNorms
from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.layout import Ticket
from fastdp.engine.passes import Passes, repeatable
from fastdp.engine.policy import Policy
from fastdp.engine.randomness import preserve_rng
from fastdp.engine.shards import Measured, norm
from fastdp.engine.uses import uncast
from fastdp.verify.definition import coupled
from fastdp.verify.probe import Probe, seeds_for

#: How far norms and sums may be off, in float32 and in anything less.
_TOLERANCE, _LOW_PRECISION = 1e-3, 0.1
#: Rows whose gradients are compared.
_ROWS = 2


@dataclass(frozen=True)
class _KnownScales(Policy):
    """The method's groups with fixed scales for some units and 0 for others; records the squared norms."""

    known: Mapping[int, float] = field(default_factory=dict)
    seen: list[torch.Tensor] = field(default_factory=list)

    def scales(self, upper: UpperNorms) -> torch.Tensor:
        squared = upper.measured
        self.seen.append(squared)
        known = torch.zeros(squared.shape[1], device=squared.device)
        for unit, weight in self.known.items():
            known[unit] = weight
        known = torch.where(torch.isfinite(squared).all(0), known, 0.0)
        return known.expand(squared.shape[0], -1).clone()


def check_engine(passes: Passes, call: Call, ticket: Ticket, rows: Sequence[int]) -> None:
    """Verify the norms and the weighted sum that the engine finds for some rows, or for packed units.

    Also verifies that a row's loss sends exact zeros to the inputs of all other rows.

    Raises:
        UnsupportedUse: unless they are plain autograd's.
        SelfCheckError: if a gradient reaches another row, or the backward pass draws random numbers of its own.
    """
    probe = Probe(passes, call, ticket)
    batch, small = call, ticket
    if not probe.packed:
        rows = list(rows[:_ROWS]) if len(rows) > 1 else [rows[0]] * 2
        batch = probe.rows(rows)
        small = Ticket(torch.arange(len(rows)), torch.ones(len(rows)), is_last=True)
    layout = small.layout(passes.device)
    units = [unit for unit in range(layout.units) if float(layout.weights[unit]) > 0]
    if probe.packed:
        units = units[:_ROWS]
    elif rows[0] == rows[1]:
        units = [0]
    kept = passes.accumulator
    policy, names = kept.policy, list(passes.read)
    scales = _KnownScales(
        policy.bounds, policy.stds, policy.group_of, policy.masks, known={u: 1 / (1 + u) for u in units}
    )
    passes.accumulator = Accumulator(passes.read, scales, passes.weights)
    passes.accumulator.tables = kept.tables
    dtypes = _LowPrecision()
    try:
        with uncast(passes.device):
            with preserve_rng(passes.model):
                _run_engine(passes, batch, small, dtypes)
            found = Comparison(passes.accumulator.sums, scales.known)

            def take(unit: int, index: int, gradient: torch.Tensor) -> None:
                found.take(unit, names[index], passes.weights.measured(names[index], gradient))

            inputs = probe.unit_gradients(batch, small.rows, units, take)
    finally:
        passes.accumulator = kept
    own = layout.token_segments if layout.token_segments is not None else layout.lane_units
    for unit, gradients in zip(units, inputs):
        for gradient in gradients:
            if gradient.shape[: own.dim()] == own.shape and bool((gradient[own != unit].nan_to_num() != 0).any()):
                raise coupled(probe, batch if probe.packed else call, 0 if probe.packed else rows[unit])
    kinds = {p.dtype for p in passes.model.parameters() if p.is_floating_point()}
    low = dtypes.found or not kinds <= {torch.float32, torch.float64}
    measured = {unit: float(scales.seen[0][:, unit].double().sum()) ** 0.5 for unit in units}
    found.judge(measured, tolerance=_LOW_PRECISION if low else _TOLERANCE)


def _run_engine(passes: Passes, call: Call, ticket: Ticket, dtypes: _LowPrecision) -> None:
    """One forward and backward pass by the route of uses, into the accumulator."""
    with dtypes:
        output, _ = passes.run_forward(call, ticket, verify=True)
    if passes.returns_loss:
        tops = [require_loss(output)]
        seeds = [torch.ones_like(tops[0])]
    else:
        tops = differentiable(output)
        seeds = [s / passes.scale(ticket) for s in seeds_for(tops)]
    # The logits beside a loss are let go of before its backward pass, as they are in a step.
    del output
    with repeatable(passes.model):
        torch.autograd.backward(tops, seeds)


class _LowPrecision(TorchFunctionMode):
    """Notes whether a model computes in less than float32, as under an autocast of its own."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point() and out.dtype.itemsize < 4:
            self.found = True
        return out


class Comparison:
    """The engine's weighted sum less autograd's gradients, each taken as it arrives, so that one at a time is in memory.

    Args:
        sums: by parameter, float32; they are changed.
        weights: of each unit in those sums.
    """

    def __init__(self, sums: dict[str, torch.Tensor], weights: Mapping[int, float]):
        self._residual, self._weights = sums, weights
        self._sizes: dict[int, dict[str, float]] = {unit: {} for unit in weights}

    def take(self, unit: int, name: str, gradient: Measured) -> None:
        """One parameter's gradient by autograd. Raises `UnsupportedUse` if one comes in parts, whose norms do not add up."""
        sizes, weight = self._sizes[unit], self._weights[unit]
        if name in sizes:
            raise UnsupportedUse("a gradient comes in several parts: checkpoint with use_reentrant=False")
        sizes[name] = gradient.norm
        if not math.isfinite(gradient.norm):
            return
        if name in self._residual:
            self._residual[name].sub_(gradient.values, alpha=weight)
        else:
            self._residual[name] = gradient.values.float() * -weight

    def judge(self, measured: Mapping[int, float], *, tolerance: float) -> None:
        """Raise `UnsupportedUse` if a norm or the sum is off by more than ``tolerance`` of its size."""
        truths = {unit: math.sqrt(sum(size**2 for size in sizes.values())) for unit, sizes in self._sizes.items()}
        worst, error = self._worst()
        finite = True
        for unit, truth in truths.items():
            # An example that both find not to be finite takes no part.
            if not (math.isfinite(measured[unit]) or math.isfinite(truth)):
                finite = False
                continue
            if not (math.isfinite(measured[unit]) and abs(measured[unit] - truth) <= tolerance * truth + 1e-12):
                raise UnsupportedUse(
                    f"no rule fits how {worst} is read: an example's gradient norm is {measured[unit]:.6g} by the rules and "
                    f"{truth:.6g} by autograd"
                )
        if finite and not error <= tolerance:
            raise UnsupportedUse(f"no rule fits how {worst} is read: its summed gradient is off by {error:.2g}")

    def _worst(self) -> tuple[str, float]:
        scale: dict[str, float] = {}
        for unit, sizes in self._sizes.items():
            for name, size in sizes.items():
                scale[name] = scale.get(name, 0.0) + self._weights[unit] * size
        most = max(scale.values(), default=0.0)
        errors = {
            # A gradient that vanishes next to the others is rounding noise: it is judged on their scale.
            name: norm(gap) / max(scale.get(name, 0.0), 1e-4 * most, 1e-30)
            for name, gap in self._residual.items()
        }
        return max(errors.items(), key=lambda pair: (math.isnan(pair[1]), pair[1]), default=("nothing", 0.0))
