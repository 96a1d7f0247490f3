"""Products with a trained matrix: linear layers, `addmm`, and matrix products from either side."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fastdp.engine.rules.head import take
from fastdp.engine.uses.lanes import PerExampleParameter
from fastdp.engine.uses.logits import Logits
from fastdp.engine.uses.reads import Reads
from fastdp.engine.uses.selections import Selection
from fastdp.engine.uses.use import CaptureContext, LinearUse, Product, linear_with_capture, operation_kind
from fastdp.ops.routes import NARROW


def linear_of(module: torch.nn.Linear, reads: Reads, context: CaptureContext, x: torch.Tensor) -> Any:
    """Capture a call of torch's own linear layer; its use is looked up by the shape of the input after the first time."""
    # Written out, as every layer runs this in every step, and one more call would take as long as all of it.
    own, layout = module._parameters, context.layout
    weight, bias = own.get("weight"), own.get("bias")
    known = reads.known.get(("linear", id(weight), id(bias), x.shape, layout.rows))
    plain = layout.token_segments is None and id(weight) not in reads.heads.weights
    # An attribute of the module may hide its parameter.
    if known is not None and plain and module.__dict__.keys().isdisjoint(own):
        kind, use, held = known
        context.shapes.add(kind)
        return linear_with_capture(x, weight, bias, context, use, held)
    return _linear(reads, context, x, module.weight, module.bias)


def _linear(reads: Reads, context: CaptureContext, input: Any, weight: Any, bias: Any = None) -> Any:
    if id(weight) not in reads.heads.weights or any(isinstance(t, PerExampleParameter) for t in (input, bias)):
        return _product(reads, context, "linear", input, weight, bias, swap=False)
    product = functools.partial(_product, reads, context, "linear", input, weight, bias, swap=False)
    trained = (weight if reads.is_trained(weight) else None, bias if reads.is_trained(bias) else None)
    owner = trained[0] if trained[0] is not None else trained[1]
    if owner is not None:
        fold = reads.fold("linear", owner, input, context)
        if fold is None or not fold.natural:
            return product()

    def compute() -> torch.Tensor:
        return F.linear(input, weight, bias) if owner is None else product()

    def losses_of(logits: Logits, target: torch.Tensor, ignored: int, reduced: Any) -> torch.Tensor:
        return take(logits, target, ignored, reduced, context, trained)

    return reads.heads.leave_out(input, weight, bias, compute, losses_of)


def _addmm(
    reads: Reads, context: CaptureContext, input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    if beta != 1 or alpha != 1 or reads.is_trained(mat1):
        return NotImplemented
    layout, plain = context.layout, type(mat1) is torch.Tensor
    known = reads.known.get(("addmm", id(mat2), id(input), mat1.shape, layout.rows)) if plain else None
    if known is not None and layout.token_segments is None:
        kind, use, held = known
        context.shapes.add(kind)
        return linear_with_capture(mat1, mat2, input, context, use, held)
    return _product(reads, context, "addmm", mat1, mat2, input, swap=True)


def _matmul(reads: Reads, context: CaptureContext, input: Any, other: Any) -> Any:
    if not reads.is_trained(other) or other.dim() != 2 or reads.is_trained(input):
        return NotImplemented
    return _product(reads, context, "matmul", input, other, None, swap=True)


def _product(
    reads: Reads, context: CaptureContext, operation: str, x: Any, weight: Any, bias: Any, *, swap: bool
) -> Any:
    trained = (reads.is_trained(weight), reads.is_trained(bias))
    if True not in trained or isinstance(weight, PerExampleParameter) or isinstance(bias, PerExampleParameter):
        return NotImplemented
    if reads.is_trained(x):
        x = PerExampleParameter.of(x, context)
    laned = isinstance(x, PerExampleParameter)
    fold = None if laned else reads.fold(operation, weight if trained[0] else bias, x, context)
    if fold is not None:
        if fold.axis == x.dim() - 1:  # The product would sum over the rows.
            return NotImplemented
        use = Product(swap, None, False, trained, None if fold.natural else fold)
        # The factors of wide matrices are kept for the sums in any case; a processor saves nothing with theirs.
        narrow, whole = min(weight.shape) <= NARROW, fold.natural and trained[0] and weight.dim() == 2
        whole &= x.device.type != "cpu" or (narrow and not swap)
        held = x.numel() // x.shape[-1] * sum(weight.shape) * x.element_size() if narrow and x.numel() else 0
        held = held if whole else 1 << 62  # more than may wait
        if isinstance(fold, Selection):
            return fold.follow(linear_with_capture(x, weight, bias, context, use, held))
        if trained[0]:
            rows = context.layout.rows
            kind = operation_kind(operation, x.shape, rows, fold)
            reads.keep((operation, id(weight), id(bias), x.shape, rows), (kind, use, held))
        return linear_with_capture(x, weight, bias, context, use, held)
    own = tuple(p for p, read in zip((weight, bias), trained) if read)
    if laned:
        out = LinearUse.apply(x.lanes, weight, bias, context, Product(swap, None, True, trained, None))
        return PerExampleParameter(out, context, sources=own + x.sources)
    out = LinearUse.apply(x, weight, bias, context, Product(swap, context.layout.lanes, True, trained, None))
    return PerExampleParameter(out, context, sources=own)


HANDLERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.addmm, torch.Tensor.addmm), _addmm),
    **dict.fromkeys((torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__), _matmul),
}
