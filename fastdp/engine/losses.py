"""Per-example losses inside a model's own forward, and the boundary at which a backward pass enters the engine.

The losses that stock models return average over the tokens of a whole batch, so that one example's loss depends on how
long the others are. During training forwards only, torch's loss functions return the mean over units of each unit's
own mean instead; evaluation keeps the usual figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from fastdp.engine.layout import Layout

_ELEMENTWISE_LOSSES = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
_CLASS_LOSSES = ("cross_entropy", "nll_loss")


class LossTerms:
    """The losses intercepted in one forward pass: a scalar that the model goes on computing with, and its units."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.scalars: list[torch.Tensor] = []
        self.per_unit: list[torch.Tensor] = []
        self.unmapped: str | None = None

    def add(self, losses: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor | None:
        """Take token losses ``[N]`` with their normalising weights; None if the axis cannot be cut into units."""
        layout = self.layout
        if not layout.covers(losses.numel()) and not self._shifted(losses.numel()):
            self.unmapped = f"a loss over {losses.numel()} tokens cannot be divided among {layout.rows} rows"
            return None
        losses = losses.reshape(-1).float()
        valid = torch.ones_like(losses) if valid is None else valid.reshape(-1).to(losses.dtype)
        per_unit = self._means(losses, valid)
        self.per_unit.append(per_unit)
        scalar = masked_mean(per_unit.detach(), layout.weights).requires_grad_()
        self.scalars.append(scalar)
        return scalar

    def _shifted(self, tokens: int) -> bool:
        segments = self.layout.token_segments
        return segments is not None and tokens == segments[:, 1:].numel()

    def _means(self, losses: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        if layout.token_segments is None:
            rows = losses.view(layout.rows, -1)
            counts = valid.view(layout.rows, -1)
            return layout.sum_lanes(rows.sum(1) / counts.sum(1).clamp(min=torch.finfo(counts.dtype).tiny))
        segments = layout.token_segments
        if losses.numel() != segments.numel():
            segments = segments[:, :-1]
        zeros = losses.new_zeros(layout.units)
        sums = zeros.index_add(0, segments.reshape(-1), losses)
        counts = zeros.index_add(0, segments.reshape(-1), valid)
        return sums / counts.clamp(min=torch.finfo(counts.dtype).tiny)

    def own_tokens(self, tokens: int) -> torch.Tensor | None:
        """For packed rows, which tokens may carry a next-token label: not the last of a unit, whose label is another's."""
        segments = self.layout.token_segments
        if segments is None:
            return None
        same = segments[:, 1:] == segments[:, :-1]
        if tokens == segments.numel():
            same = F.pad(same, (0, 1))
        return same.reshape(-1)


def masked_mean(per_unit: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean over the units of weight 1 with a finite value; 0 if there are none."""
    kept = (weights > 0) & torch.isfinite(per_unit)
    return torch.where(kept, per_unit, 0.0).sum() / kept.sum().clamp(min=1)


@contextmanager
def intercepted(terms: LossTerms) -> Iterator[None]:
    """While open, torch's loss functions with a reducing ``reduction`` report to ``terms``."""
    originals = {name: getattr(F, name) for name in (*_CLASS_LOSSES, *_ELEMENTWISE_LOSSES)}
    try:
        for name in _CLASS_LOSSES:
            setattr(F, name, _class_loss(originals[name], terms))
        for name in _ELEMENTWISE_LOSSES:
            setattr(F, name, _elementwise_loss(originals[name], terms))
        yield
    finally:
        for name, original in originals.items():
            setattr(F, name, original)


def _class_loss(original: Callable[..., torch.Tensor], terms: LossTerms) -> Callable[..., torch.Tensor]:
    def loss(
        input: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        **options: Any,
    ) -> torch.Tensor:
        if reduction == "none" or not torch.is_grad_enabled() or not input.requires_grad:
            return original(input, target, weight, size_average, ignore_index, reduce, reduction, **options)
        valid = None
        if not target.is_floating_point():
            own = terms.own_tokens(target.numel())
            if own is not None:
                target = target.masked_fill(~own.view(target.shape), ignore_index)
            kept = target != ignore_index
            valid = kept if weight is None else weight[target.masked_fill(~kept, 0)] * kept
        losses = original(input, target, weight, None, ignore_index, None, "none", **options)
        scalar = terms.add(losses, valid)
        if scalar is None:
            return original(input, target, weight, size_average, ignore_index, reduce, reduction, **options)
        return scalar

    return loss


def _elementwise_loss(original: Callable[..., torch.Tensor], terms: LossTerms) -> Callable[..., torch.Tensor]:
    def loss(input: torch.Tensor, target: torch.Tensor, *args: Any, reduction: str = "mean", **options: Any) -> Any:
        if reduction == "none" or not torch.is_grad_enabled() or not input.requires_grad:
            return original(input, target, *args, reduction=reduction, **options)
        scalar = terms.add(original(input, target, *args, reduction="none", **options), None)
        if scalar is None:
            return original(input, target, *args, reduction=reduction, **options)
        return scalar

    return loss


def combine(total: torch.Tensor, terms: LossTerms, *, verify: bool) -> torch.Tensor:
    """The per-unit losses ``[units]`` of a model's scalar loss: its intercepted terms in the proportions it mixes them.

    With ``verify``, raises ValueError if the loss is not a weighted sum of the intercepted terms: whatever is added to
    them (a balancing loss, a contrast within the batch) depends on several examples at once. Without it nothing is
    read back from the device.
    """
    if len(terms.scalars) == 1 and not verify:
        return terms.per_unit[0]
    coefficients = torch.autograd.grad(total, terms.scalars, allow_unused=True, retain_graph=True)
    shares = [torch.zeros_like(s) if c is None else c for c, s in zip(coefficients, terms.scalars)]
    scale = torch.stack(shares).sum()
    if verify:
        _require_weighted_sum(total, shares, terms)
    per_unit = terms.per_unit[0] * (shares[0] / scale)
    for share, losses in zip(shares[1:], terms.per_unit[1:]):
        per_unit = per_unit + losses * (share / scale)
    return per_unit


def _require_weighted_sum(total: torch.Tensor, shares: list[torch.Tensor], terms: LossTerms) -> None:
    if not float(torch.stack(shares).detach().sum()) > 0:
        raise ValueError("the model's loss does not grow with the per-example losses inside it; nothing can be clipped")
    explained = sum(float(share) * float(scalar.detach()) for share, scalar in zip(shares, terms.scalars))
    value = float(total.detach())
    if abs(value - explained) > 1e-4 * max(abs(value), abs(explained)):
        raise ValueError(
            "the model adds something to its per-example loss (a balancing or contrastive term?) that depends on the "
            "whole batch; switch that term off in the model's configuration"
        )
