"""Products of tokens, sorted by expert, with a stack of matrices: torch's grouped product, as mixtures of experts call it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fastdp.engine.uses.experts import ExpertFactors
from fastdp.engine.uses.lanes import PerExampleParameter
from fastdp.engine.uses.reads import Reads
from fastdp.engine.uses.selections import GROUPED, Selection
from fastdp.engine.uses.shared import SharedValue
from fastdp.engine.uses.use import CaptureContext


class GroupedUse(torch.autograd.Function):
    """Groups of tokens ``[N, n]``, each times a matrix of its own of ``[E, n, m]``; ``offs`` ``[E]`` says where each ends."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        offs: torch.Tensor,
        func: Any,
        shared: SharedValue,
        whose: Selection,
        context: CaptureContext,
        *sources: Any,
    ) -> torch.Tensor:
        stack = shared.value.detach()
        # A value that was computed would outlive a checkpoint.
        ctx.of = func, context, shared.stacks, whose
        ctx.save_for_backward(x, stack, offs)
        return func(x, stack, offs=offs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x, stack, offs), gradient = ctx.saved_tensors, gradients[0].contiguous()
        func, context, pull, whose = ctx.of
        count, units = len(stack), context.layout.units
        group = torch.searchsorted(offs, torch.arange(len(x), device=x.device, dtype=offs.dtype), right=True)
        runs = group * units + whose.units
        for parameter, own in pull(ExpertFactors.of_tokens(gradient, x, runs, count, units, swap=True)):
            context.open().matrix(parameter, own, context.layout)
        back = func(gradient, stack.mT, offs=offs) if ctx.needs_input_grad[0] else None
        return (back, *[None] * (len(ctx.needs_input_grad) - 1))


def _grouped(
    func: Any, reads: Reads, context: CaptureContext, input: Any, mat2: Any, offs: Any = None, **options: Any
) -> Any:
    """The use of a stack that is a parameter, or is made of some by what keeps its factors: no others are followed."""
    stack = PerExampleParameter.of(mat2, context) if reads.is_trained(mat2) else mat2
    shared = stack.shared if isinstance(stack, PerExampleParameter) else None
    if shared is None or shared.stacks is None or isinstance(input, PerExampleParameter):
        return NotImplemented
    if input.dim() != 2 or offs is None or any(value is not None for value in options.values()):
        return NotImplemented
    whose = context.selection(input)
    context.shapes.add(("grouped_mm", (0, input.shape[1])))
    return whose.follow(GroupedUse.apply(input, offs, func, shared, whose, context, *shared.sources))


HANDLERS: dict[Any, Callable[..., Any]] = {func: functools.partial(_grouped, func) for func in GROUPED}
