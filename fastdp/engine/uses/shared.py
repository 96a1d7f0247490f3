"""Values computed from trained parameters alone, the same for all rows, and the way of a gradient's factors back to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from fastdp.calls.choices import chosen_sides
from fastdp.calls.named import functions
from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.uses.experts import ExpertFactors
from fastdp.engine.uses.factors import Factors
from fastdp.engine.uses.rows import BatchAxis
from fastdp.engine.uses.selections import Selection
from fastdp.engine.uses.use import CaptureContext, Sink
from fastdp.ops.placed import copy_to_device

#: Where the factors of a value's gradient go: to each parameter that the value is an indexing, a sum or a product of.
Pull = Callable[[Factors], list[tuple[torch.nn.Parameter, Factors]]]


@dataclass(frozen=True)
class SharedValue:
    """A value that is the same for all rows.

    Args:
        value: with a graph back to ``sources``, or without one where no gradient flows.
        sources: the parameters that it is computed from.
        pull: sends the factors of a matrix's gradient to the parameters without making the gradient; None if there is no
            such way.
        stacks: the same of a stack of matrices, `ExpertFactors`.
    """

    value: torch.Tensor
    sources: tuple[torch.nn.Parameter, ...]
    pull: Pull | None = None
    stacks: Pull | None = None

    def give_factors(self, sink: Sink, factors: Factors, context: CaptureContext) -> None:
        """Hand a sink the factors of a gradient of the value."""
        layout = context.layout
        try:
            found = None if self.pull is None else self.pull(factors)
        except UnsupportedUse:
            found = None
        for parameter, own in found or ():
            sink.matrix(parameter, own, layout)
        if found is not None:
            return
        if factors.own_offsets is not None:
            raise UnsupportedUse("a matrix computed from parameters is used on tokens that the data choose")
        self._give(factors.each(layout).view(-1, *self.value.shape), lambda p, g: sink.instances(p, g, layout))

    def give_lanes(self, sink: Sink, gradients: torch.Tensor, context: CaptureContext) -> None:
        """Hand a sink gradients of the value by lane, ``[lanes, *shape]``."""
        self._give(gradients, lambda p, g: sink.vector(p, g, context.layout))

    def _give(self, gradients: torch.Tensor, hand: Callable[[torch.nn.Parameter, torch.Tensor], None]) -> None:
        if not self.value.requires_grad:
            return
        given, sources = gradients.to(self.value.dtype), self.sources
        found: Sequence[torch.Tensor | None]
        with torch.enable_grad():
            try:
                found = torch.autograd.grad(
                    self.value, sources, given, is_grads_batched=True, retain_graph=True, allow_unused=True
                )
            except RuntimeError:
                # Some operations have no batched derivative: one after another, then.
                each = (
                    torch.autograd.grad(self.value, sources, g, retain_graph=True, allow_unused=True) for g in given
                )
                columns = ([g for g in column if g is not None] for column in zip(*each))
                found = tuple(torch.stack(column) if column else None for column in columns)
        for parameter, gradient in zip(sources, found):
            if gradient is not None:
                hand(parameter, gradient)


class SharedProduct(torch.autograd.Function):
    """``x W^T`` (or ``x W`` when ``swap``) with W a value of parameters; x is [..., n], its rows where ``fold`` says."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        shared: SharedValue,
        context: CaptureContext,
        swap: bool,
        fold: BatchAxis | Selection,
        *sources: torch.Tensor,
    ) -> torch.Tensor:
        ctx.context, ctx.shared, ctx.swap, ctx.fold = context, shared, swap, fold
        weight = shared.value.detach()
        ctx.x_dtype = x.dtype
        ctx.save_for_backward(x)
        return F.linear(x, weight.t() if swap else weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,), gradient = ctx.saved_tensors, gradients[0]
        ordered = (ctx.fold.front(t, ctx.context.layout.rows) for t in (gradient, x))
        left, right = (t.reshape(-1, t.shape[-1]) for t in ordered)
        factors = Factors(left, right, False, ctx.swap, own_offsets=ctx.fold.unit_offsets(left.shape[0]))
        ctx.shared.give_factors(ctx.context.open(), factors, ctx.context)
        back = None
        if ctx.needs_input_grad[0]:
            weight = ctx.shared.value.detach()
            back = F.linear(gradient, weight if ctx.swap else weight.t()).to(ctx.x_dtype)
        return (back, None, None, None, None, *[None] * len(ctx.shared.sources))


class SharedLanes(torch.autograd.Function):
    """A value of parameters, one copy a lane."""

    @staticmethod
    def forward(ctx: Any, shared: SharedValue, context: CaptureContext, *sources: torch.Tensor) -> torch.Tensor:
        ctx.shared, ctx.context = shared, context
        return shared.value.detach().expand(context.layout.lanes, *shared.value.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.shared.give_lanes(ctx.context.open(), gradients[0], ctx.context)
        return (None, None, *[None] * len(ctx.shared.sources))


#: These only choose and arrange entries of their first argument.
_INDEXING = functions(
    "t transpose permute movedim moveaxis swapaxes swapdims adjoint __getitem__ narrow chunk split tensor_split select unbind "
    "index_select flip contiguous clone view reshape flatten unflatten squeeze unsqueeze"
) | {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
_SCALING = functions("mul multiply __mul__ __rmul__ div true_divide __truediv__")
_ADDING = functions("add __add__ __radd__")
_CASTING = functions("to float double half bfloat16 type_as")
_JOINING = frozenset({torch.cat, torch.concat, torch.concatenate})
_PRODUCTS = functions("matmul mm bmm __matmul__")


def pull_through(
    func: Any, args: Any, kwargs: Any, result: torch.Tensor, part: int | None, *, stacks: bool = False
) -> Pull | None:
    """The way of factors, or of ``stacks`` of them, through one operation, if they stay factors."""
    if not args or (result.dim() != 3 if stacks else result.dim() < 2):
        return None
    stack = args[0].stacks if isinstance(args[0], SharedValue) else None
    if func is torch.Tensor.__getitem__ and stack is not None and result.dim() == 2 and _scalar(args[1]):
        # The loop over experts may count in one tensor.
        count, at = len(args[0].value), int(args[1])
        return lambda f: stack(ExpertFactors.of_matrix(f, at, count))
    if stacks:
        args = [replace(a, pull=a.stacks) if isinstance(a, SharedValue) else a for a in args]
    first = args[0]
    pulls = [a.pull if isinstance(a, SharedValue) else None for a in args[:3]]
    own = pulls[0]
    if func in _INDEXING and stacks:
        return _through_view(own, _value(first), result)
    if any(isinstance(a, SharedValue) and a.pull is None for a in (first if func in _JOINING else args)):
        return None
    if func in _INDEXING and own is not None:
        return _through_index(own, func, _value(first), args, kwargs, part)
    if func in _CASTING and own is not None:
        return own
    if len(args) < 2 and func not in _JOINING:
        return None
    if func in _JOINING:
        return None if stacks else _through_parts(first, args[1] if len(args) > 1 else kwargs.get("dim", 0))
    if func in _SCALING and own is not None and _scalar(args[1]) and not kwargs:
        factor = args[1] if func not in functions("div true_divide __truediv__") else 1 / args[1]
        return lambda f: own(replace(f, left=f.left * factor))
    if func in _ADDING and not kwargs:
        return _through_sum(args[:2], result)
    if func is torch.baddbmm and stacks and len(args) == 3 and kwargs.keys() <= {"alpha"}:
        terms, product = _through_sum(args[:1], result), _through_product(args[1:], pulls[1:], transposed=False)
        return terms and (lambda f: terms(f) + product(replace(f, left=f.left * kwargs.get("alpha", 1))))
    if func in _PRODUCTS or func is F.linear:
        if len(args) > 2 or kwargs or not all(isinstance(a, (torch.Tensor, SharedValue)) for a in args):
            return None
        alike = not stacks or {len(_value(a)) for a in args} == {len(result)}
        if {_value(a).dim() for a in args} == {3 if stacks else 2} and alike:
            return _through_product(args, pulls, transposed=func is F.linear)
    return None


def _scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _through_view(own: Pull | None, first: torch.Tensor, result: torch.Tensor) -> Pull | None:
    """Through what a stack of matrices is a view of: all of a parameter, or the transposed matrices of another stack."""
    base, strides = result._base, result.stride()
    whole = isinstance(base, torch.nn.Parameter) and base.is_contiguous() and result.numel() == base.numel()
    if whole and torch.empty_like(result, device="meta").stride() == strides:  # No entry stands in it twice.
        return lambda factors: [(base, replace(factors, strides=strides))]  # type: ignore[call-arg, list-item]
    if own is not None and result.is_set_to(first.mT):
        return lambda factors: own(replace(factors, swap=not factors.swap))
    return None


def _value(argument: Any) -> torch.Tensor:
    value: torch.Tensor = argument.value if isinstance(argument, SharedValue) else argument
    return value


def _through_index(own: Pull, func: Any, first: torch.Tensor, args: Any, kwargs: Any, part: int | None) -> Pull | None:
    """Through a choice of whole rows and columns."""
    choice = chosen_sides(func, first, args, kwargs, part)
    if choice is None:
        return None
    swapped, chosen, sizes = choice

    def pull(factors: Factors) -> list[tuple[torch.nn.Parameter, Factors]]:
        given = reversed(factors.sides) if swapped else factors.sides
        first, second = (
            f if index is None else f.new_zeros(f.shape[0], size).index_add_(1, copy_to_device(index, f.device), f)
            for f, index, size in zip(given, chosen, sizes)
        )
        return own(factors.moved(first, second, turned=swapped))

    return pull


def _through_parts(parts: Any, dim: Any) -> Pull | None:
    """Through a concatenation of matrices: each has its own columns of one of the factors."""
    if not isinstance(parts, (list, tuple)) or not isinstance(dim, int):
        return None
    pulls = [p.pull if isinstance(p, SharedValue) else None for p in parts]
    sizes, first = [_value(p).shape[dim] for p in parts], dim % 2 == 0

    def pull(factors: Factors) -> list[tuple[torch.nn.Parameter, Factors]]:
        side = "left" if first != factors.swap else "right"
        cut = getattr(factors, side).split(sizes, dim=1)
        pairs = [own(replace(factors, **{side: piece})) for own, piece in zip(pulls, cut) if own is not None]
        return [pair for found in pairs for pair in found]

    return pull


def _through_sum(terms: Any, result: torch.Tensor) -> Pull | None:
    """Through a sum of matrices of one shape; constants take nothing."""
    own = [term for term in terms if isinstance(term, SharedValue)]
    if any(term.value.shape != result.shape for term in own):
        return None
    return lambda factors: [pair for term in own if term.pull for pair in term.pull(factors)]


def _through_product(args: Any, pulls: list[Pull | None], *, transposed: bool) -> Pull:
    """Through ``A B`` (or ``A B^T``): A takes (L, R B^T), B takes (A^T L, R)."""
    a, b = (_value(t).detach() for t in args)
    b = b.mT if transposed else b

    def pull(factors: Factors) -> list[tuple[torch.nn.Parameter, Factors]]:
        left, right = factors.sides
        found = []
        if pulls[0] is not None:
            found += pulls[0](factors.moved(left, factors.product(right, b.mT)))
        if pulls[1] is not None:
            inner = factors.product(left, a)
            pair = (right, inner) if transposed else (inner, right)
            found += pulls[1](factors.moved(*pair, turned=transposed))
        return found

    return pull
