"""Products of tokens, sorted by expert, with a stack of matrices: torch's grouped product, as mixtures of experts call it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.uses.experts import ExpertFactors
from fastdp.engine.uses.lanes import PerLane
from fastdp.engine.uses.reads import Reads
from fastdp.engine.uses.selections import GROUPED, Selection
from fastdp.engine.uses.use import Tap


class GroupedUse(torch.autograd.Function):
    """Groups of tokens ``[N, n]``, each times a matrix of its own of ``[E, n, m]``; ``offs`` ``[E]`` says where each ends."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        stack: torch.Tensor,
        offs: torch.Tensor,
        func: Callable[..., torch.Tensor],
        tap: Tap,
        parameter: torch.nn.Parameter,
        whose: Selection,
    ) -> torch.Tensor:
        plain = stack.detach()
        ctx.of = func, tap, parameter, whose, plain.stride() == parameter.stride()
        ctx.save_for_backward(x, plain, offs)
        return func(x, plain, offs=offs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x, stack, offs), gradient = ctx.saved_tensors, gradients[0].contiguous()
        func, tap, parameter, whose, swap = ctx.of
        count, units = len(stack), tap.layout.units
        group = torch.searchsorted(offs, torch.arange(len(x), device=x.device, dtype=offs.dtype), right=True)
        runs = group * units + whose.units
        tap.open().matrix(parameter, ExpertFactors.of_tokens(gradient, x, runs, count, units, swap=swap), tap.layout)
        back = func(gradient, stack.mT, offs=offs) if ctx.needs_input_grad[0] else None
        return back, None, None, None, None, None, None


def _grouped(
    func: Callable[..., torch.Tensor], reads: Reads, tap: Tap, input: Any, mat2: Any, offs: Any = None, **options: Any
) -> Any:
    """The use of a stack that is a parameter, or the transpose of one: no others are followed."""
    shared = mat2.shared if isinstance(mat2, PerLane) else None
    stack = mat2 if shared is None else shared.value
    if isinstance(input, PerLane) or not (shared is not None or reads.is_trained(mat2)):
        return NotImplemented
    parameter = stack if shared is None else shared.sources[0]
    own = parameter.dim() == 3 and stack.data_ptr() == parameter.data_ptr()
    own = own and (stack.shape, stack.stride()) in [(p.shape, p.stride()) for p in (parameter, parameter.mT)]
    if not own or input.dim() != 2 or offs is None or any(value is not None for value in options.values()):
        raise UnsupportedUse("a grouped product with another stack of matrices than a parameter's own")
    whose = tap.selection(input)
    tap.shapes.add(("grouped_mm", (0, input.shape[1])))
    return whose.follow(GroupedUse.apply(input, stack, offs, func, tap, parameter, whose))


HANDLERS: dict[Any, Callable[..., Any]] = {func: functools.partial(_grouped, func) for func in GROUPED}
