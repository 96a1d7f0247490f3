"""The operations that read trained parameters, each capturing in its backward what the per-example gradient is made of.

A use of a matrix is a factor pair (L, R) over a flat token axis: the gradient of a unit is the sum over its tokens of
L_t R_t^T. Nothing is captured in the forward pass: forward hooks fire twice, or never, under gradient checkpointing,
while the backward of an `autograd.Function` runs exactly once a pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch.autograd.graph import GradientEdge

import fastdp.ops as ops
from fastdp.engine.errors import OUTSIDE_OF_LOSS, UnsupportedUse
from fastdp.engine.uses.factors import Factors
from fastdp.engine.uses.layout import Layout
from fastdp.engine.uses.rows import BatchAxis
from fastdp.engine.uses.selections import Selection, SelectionMode


class Sink(Protocol):
    """What a backward pass hands its captures to."""

    def matrix(self, parameter: torch.nn.Parameter, factors: Factors, layout: Layout) -> None:
        """Take one use of a matrix."""

    def vector(self, parameter: torch.nn.Parameter, lanes: torch.Tensor, layout: Layout) -> None:
        """Take the gradient of an expanded parameter, ``[lanes, *shape]``."""

    def tokens(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, layout: Layout, laned: bool) -> None:
        """Take a bias's gradient by token, ``[N, m]``."""

    def instances(self, parameter: torch.nn.Parameter, gradients: torch.Tensor, layout: Layout) -> None:
        """Take whole gradients by unit, ``[units, *shape]``."""


@functools.lru_cache(1 << 12)
def operation_kind(operation: str, shape: torch.Size, rows: int, fold: BatchAxis | None) -> tuple[str, tuple[int, ...]]:
    """An operation and the shape of its input for one row, all of it without rows; `UnsupportedUse` if it cannot be cut."""
    own = list(shape)
    if fold is not None:
        fold.require(shape, rows, operation)
        # How many entries the data select follows from no shape.
        own[fold.axis] = 0 if fold.chosen else own[fold.axis] // rows
    return operation, tuple(own)


class CaptureContext:
    """Joins the captures of one forward pass to whichever sink its backward pass has opened.

    Args:
        layout: of the rows.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        self.sink: Sink | None = None
        #: Every kind of use in the pass: its operation, and the shape of its input for one row (all of it, without rows).
        self.shapes: set[tuple[str, tuple[int, ...]]] = set()
        #: What lets go, when the backward pass is over, of what uses keep from the forward pass beside what autograd does.
        self.drops: list[Callable[[], None]] = []
        #: What follows the entries that the data select, in modules that do; None where nothing does.
        self.selected: SelectionMode | None = None
        #: The ids that were looked up in a table, by its identity, rows first.
        self.looked_up: dict[int, list[torch.Tensor]] = {}
        #: Bytes of gradients that uses of autograd's own may leave to the end of the backward pass; none of them below 0.
        self.room = -1
        self.own: list[OwnProduct | OwnLanes] = []
        #: Layer norms whose gradients are there and wait for others, their bytes, and how many may wait.
        self.norms: list[LayerNormCapture] = []
        self.waiting = self.most = 0
        #: Whether a backward pass has to run all of its graph: something hooks on it that lies before no parameter, or a module
        #: that reads trained ones ran without gradients, as under reentrant checkpointing, and is computed anew within it.
        self.whole = False

    def note(self, operation: str, x: torch.Tensor, fold: BatchAxis | None) -> None:
        """Note the shape of a use's input; raises `UnsupportedUse` if it cannot be cut into the rows."""
        self.shapes.add(operation_kind(operation, x.shape, self.layout.rows, fold))

    def selection(self, x: torch.Tensor) -> Selection:
        """The rows of entries that the data selected. Raises `UnsupportedUse` if nobody knows them."""
        whose = None if self.selected is None else self.selected.owners.of(x)
        if self.selected is None or whose is None:
            raise UnsupportedUse("the data choose tokens in another way than when traced")
        return Selection(self.selected.owners, whose, self.layout.lane_units, self.layout.units)

    def close(self) -> None:
        """The backward pass is over."""
        self.sink = None
        for drop in self.drops:
            drop()
        self.drops.clear()
        self.looked_up.clear()
        self.norms.clear()

    def restart(self) -> None:
        """Forget a forward pass that failed."""
        self.close()
        self.shapes, self.own, self.whole = set(), [], False

    def allow(self, room: int) -> None:
        """Let so many bytes wait; of layer norms, whose inputs nothing else keeps, a 64th."""
        self.room, self.most = room, room // 64

    def open(self) -> Sink:
        if self.sink is None:
            raise RuntimeError(OUTSIDE_OF_LOSS)
        return self.sink


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def as_autocast(tensor: Any) -> Any:
    """Follow autocast, which does not reach inside an `autograd.Function`."""
    if tensor is None or not torch.is_autocast_enabled(tensor.device.type) or not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def uncast(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast meanwhile, on devices for which torch has any."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


class Use(torch.autograd.Function):
    """An operation that captures: torch's own function, called without what torch does before it for functorch's tensors."""

    #: `apply` where no transform of functorch's is active: looking at every argument takes the host half as long as a product.
    plainly: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.plainly = super(torch.autograd.Function, cls).apply  # type: ignore[misc]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super().apply(*args) if torch._C._are_functorch_transforms_active() else cls.plainly(*args)


#: Where a loop makes a term of its loss of what has no row for each example, or begins to.
LOSS_TERM = (
    "The loop's loss uses an output, beside the model's own loss, that has no row for each example or that it did not use at "
    "first. Compute the whole loss in forward()."
)


class ForbidBackward(Use):
    """A model's output that may be read and not differentiated."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, reason: str = LOSS_TERM) -> torch.Tensor:
        ctx.reason = reason
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(ctx.reason)


class Product(NamedTuple):
    """How a matrix or its bias is used.

    Args:
        swap: the parameter is stored as [n, m].
        lanes: how often the result is viewed, where x has no unit axis and the product is taken once; else None.
        laned: tokens come in equal blocks a lane.
        trained: whether the matrix is, and the bias.
        fold: where x's rows are; None where they are first, in order.
    """

    swap: bool
    lanes: int | None
    laned: bool
    trained: tuple[bool, bool]
    fold: BatchAxis | Selection | None


class OwnProduct(NamedTuple):
    """A linear layer that autograd differentiates by itself, for x alone: no Python runs for it in a backward pass.

    Args:
        edge: where the output's gradient is found.
        x: its input, and how often that had been written to.
        weight, bias: the parameters; None for a bias that is not trained.
        swap: the matrix is stored as [n, m].
    """

    edge: GradientEdge
    x: torch.Tensor
    version: int
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    swap: bool

    def watch(self, take: Callable[[torch.Tensor], None]) -> Any:
        """Have the gradient taken within a backward pass; returns what ends that."""
        number = self.edge.output_nr
        return self.edge.node.register_prehook(lambda gradients: take(gradients[number]))

    def give(self, gradient: torch.Tensor, right: torch.Tensor, sink: Sink, layout: Layout) -> None:
        """Hand a sink what the gradient of the output comes to, x being ``right`` with its tokens on one axis."""
        if self.x._version != self.version:
            raise RuntimeError("the input of a linear layer was modified in place after the layer had read it")
        flat = _flat(gradient)
        if self.bias is not None:
            sink.tokens(self.bias, flat, layout, False)
        sink.matrix(self.weight, Factors(flat, right, swap=self.swap), layout)


class OwnLanes(NamedTuple):
    """Copies of a parameter, one a lane, that are a leaf to autograd: no Python runs for it in a backward pass.

    Args:
        edge: the copies, ``[lanes, 1 ... 1, *shape]``.
        parameter: what they are copies of.
    """

    edge: torch.Tensor
    parameter: torch.nn.Parameter

    def watch(self, take: Callable[[torch.Tensor], None]) -> Any:
        """As `OwnProduct.watch`."""
        return self.edge.register_hook(take)


class LayerNormCapture(NamedTuple):
    """A layer norm that autograd differentiated by itself, for x alone, once the gradient of its output is there.

    Args:
        gradient, x: of its output, and its input, tokens on one axis.
        mean, rstd: of each row of x, and the inverse of its standard deviation.
        weight, bias: the parameters; None for one that is not trained.
    """

    gradient: torch.Tensor
    x: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor
    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None


#: The hooks on what autograd saves that are active, if there are any: as under checkpointing, which keeps no inputs.
_saving_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: True)


def linear_with_capture(x: Any, weight: Any, bias: Any, context: CaptureContext, use: Product, held: int) -> Any:
    """``x W^T + b`` as an `OwnProduct` of the pass, or else as a `LinearUse`.

    ``held`` are the bytes of its input and its output's gradient, if they wait for others.
    """
    if not _differentiates_itself(x, context, held):
        return LinearUse.apply(x, weight, bias, context, use)
    plain = weight.detach()
    out = F.linear(x, plain.t() if use.swap else plain, None if bias is None else bias.detach())
    # What is written into a view changes the way to it; the product before stays where it is.
    made = out if out._base is None else out._base
    edge = GradientEdge(made.grad_fn, made.output_nr)  # type: ignore[arg-type]
    context.own.append(OwnProduct(edge, x, x._version, weight, bias if use.trained[1] else None, use.swap))  # type: ignore[arg-type]
    return out


def expand_with_capture(
    parameter: torch.nn.Parameter, x: torch.Tensor, context: CaptureContext, between: int
) -> torch.Tensor:
    """A parameter's copies, one a lane, to meet x entry by entry: `OwnLanes` of the pass, or else an `ExpandUse`."""
    lanes = context.layout.lanes
    if not _differentiates_itself(x, context, lanes * parameter.nbytes):
        return ExpandUse.apply(parameter, context, between)  # type: ignore[no-any-return]
    copies = parameter.detach().expand(lanes, *[1] * between, *parameter.shape).requires_grad_()
    context.own.append(OwnLanes(copies, parameter))
    return copies


def layer_norm_with_capture(
    x: Any, weight: Any, bias: Any, eps: float, context: CaptureContext, trained: tuple[bool, bool]
) -> Any:
    """A layer norm over the last dimension that autograd differentiates by itself, or else a `LayerNormUse`."""
    if not _differentiates_itself(x, context, 0):
        return LayerNormUse.apply(x, weight, bias, eps, context, trained)
    scale, shift = (None if parameter is None else parameter.detach() for parameter in (weight, bias))
    out, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], scale, shift, eps)
    own = [x, mean, rstd, *(parameter if reads else None for parameter, reads in zip((weight, bias), trained))]
    out.grad_fn.register_prehook(functools.partial(_arrived, context, own))  # type: ignore[union-attr]
    context.whole = True
    return out


def _arrived(context: CaptureContext, own: list[Any], gradients: Sequence[torch.Tensor | None]) -> None:
    """The gradient of a layer norm's output is there; it waits for a few others, as that and the input take memory."""
    if gradients[0] is None:
        return
    if not own:
        raise RuntimeError("a second backward pass went through a layer norm, whose input was let go of by the first")
    x, *rest = own
    # Nodes outlive their pass, and would keep all inputs until it is over.
    own.clear()
    context.norms.append(LayerNormCapture(_flat(gradients[0]), _flat(x), *rest))
    context.waiting += 2 * gradients[0].nbytes
    if context.waiting > context.most:
        _give_norms(context)


def _give_norms(context: CaptureContext) -> None:
    """Hand the sink the gradients of layer norms that wait, of each shape in one launch."""
    found, context.norms, context.waiting = context.norms, [], 0
    alike: dict[torch.Size, list[LayerNormCapture]] = {}
    for own in found:
        alike.setdefault(own.x.shape, []).append(own)
    for shape, members in alike.items():
        gradients, xs, means, rstds, *_ = zip(*members)
        each = ops.affine_sums_group(gradients, xs, means, rstds, context.layout.offsets(shape[0]))
        for own, both in zip(members, each):
            for parameter, sums in zip((own.weight, own.bias), both):
                if parameter is not None:
                    context.open().instances(parameter, sums, context.layout)


def _differentiates_itself(x: torch.Tensor, context: CaptureContext, held: int) -> bool:
    """Whether autograd shall differentiate a use of x by itself, whose gradient of so many bytes then waits for others."""
    own = context.room >= held and x.requires_grad and _saving_hooks(True) is None
    if not own or torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled(x.device.type):
        return False
    context.room -= held
    return True


def differentiate(
    tops: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor],
    every: Sequence[OwnProduct | OwnLanes],
    context: CaptureContext,
    parameters: Iterable[torch.nn.Parameter],
    *,
    retain: bool,
) -> None:
    """A backward pass, and what it brings to uses of autograd's own, for the sink of context.

    All uses give their ``parameters`` no gradient; what any gets in another way is in its `.grad` afterwards.
    """
    caught: list[torch.Tensor | None] = [None] * len(every)
    if context.whole or not every:
        hooks = [own.watch(functools.partial(caught.__setitem__, at)) for at, own in enumerate(every)]
        torch.autograd.backward(tops, seeds, retain_graph=retain)
        for hook in hooks:
            hook.remove()
    else:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        ends: Any = [*[own.edge for own in every], *trained]
        found: Sequence[torch.Tensor | None] = torch.autograd.grad(
            tops, ends, seeds, retain_graph=retain, allow_unused=True
        )
        caught[:] = found[: len(every)]
        for parameter, gradient in zip(trained, found[len(every) :]):
            if gradient is not None:
                parameter.grad = gradient
    _give_norms(context)
    if not every:
        return
    sink, layout = context.open(), context.layout
    right = x = None
    for own, gradient in zip(reversed(every), reversed(caught)):
        if gradient is None:
            continue
        if isinstance(own, OwnLanes):
            sink.vector(own.parameter, gradient.view(-1, *own.parameter.shape), layout)
            continue
        if right is None or own.x is not x:
            x = own.x
            right = _flat(x)
        own.give(gradient, right, sink, layout)


class LinearUse(Use):
    """``x W^T + b`` (or ``x W + b`` when swapped) with W, b or both trained; x is [..., n]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        context: CaptureContext,
        use: Product,
    ) -> torch.Tensor:
        swap, lanes, _, (trained, shifted), _ = use
        ctx.of = context, use, x.dtype, weight if trained else None, bias if shifted else None
        if torch.is_autocast_enabled(x.device.type):
            x, weight, bias = as_autocast(x), as_autocast(weight), as_autocast(bias)
        ctx.save_for_backward(x if trained else None, weight if ctx.needs_input_grad[0] else None)
        flat = weight if weight.dim() == 2 else weight.flatten(1)
        out = F.linear(x, flat.t() if swap else flat, bias)
        if out._is_view():
            # Torch forbids models to write into a view that a function made.
            out = torch.ops.aten._unsafe_view(out, out.shape)
        return out if lanes is None else out.expand(lanes, *out.shape).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0]
        context, (swap, lanes, laned, _, fold), dtype, matrix, bias = ctx.of
        sink, layout = context.sink or context.open(), context.layout
        x, weight = ctx.saved_tensors
        flat = gradient if fold is None else fold.front(gradient, layout.rows)
        if flat.dim() != 2:
            flat = flat.reshape(-1, flat.shape[-1])
        own_offsets = None if fold is None else fold.unit_offsets(flat.shape[0])
        if bias is not None and own_offsets is not None:
            sink.instances(bias, ops.column_sums(flat, own_offsets), layout)
        elif bias is not None:
            sink.tokens(bias, flat, layout, laned)
        if matrix is not None:
            if lanes is not None:
                x = x.expand(lanes, *x.shape)
            elif fold is not None:
                x = fold.front(x, layout.rows)
            right = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
            sink.matrix(matrix, Factors(flat, right, laned, swap, own_offsets=own_offsets), layout)
        back = None
        if weight is not None:
            weight = weight if weight.dim() == 2 else weight.flatten(1)
            weight = weight.t() if swap else weight
            if fold is None:
                # Whatever had to be copied for the flat one is not copied once more.
                back = flat.mm(weight).view(*gradient.shape[:-1], weight.shape[1])
            else:
                back = gradient.matmul(weight)
            if back.dtype != dtype:
                back = back.to(dtype)
        return back, None, None, None, None


class EmbeddingUse(Use):
    """Rows of a table: ids [...] -> [..., n], ids with their units first. Padding rows get no gradient.

    ``own_offsets`` say where units begin, if the layout does not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ids: torch.Tensor,
        table: torch.Tensor,
        padding_idx: int | None,
        context: CaptureContext,
        laned: bool,
        own_offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        ctx.context, ctx.table, ctx.padding_idx = context, table, padding_idx
        ctx.laned, ctx.own_offsets = laned, own_offsets
        ctx.save_for_backward(ids)
        if not laned and own_offsets is None:
            context.looked_up.setdefault(id(table), []).append(ids)
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        sink, (ids,) = ctx.context.open(), ctx.saved_tensors
        ids, right = ids.reshape(-1), _flat(gradients[0])
        if ctx.padding_idx is not None:
            right = right.masked_fill((ids == ctx.padding_idx).unsqueeze(1), 0)
        sink.matrix(ctx.table, Factors(ids, right, ctx.laned, own_offsets=ctx.own_offsets), ctx.context.layout)
        return None, None, None, None, None, None


class LayerNormUse(Use):
    """`F.layer_norm` over the last dimension with trained weight or bias, saving what torch itself saves."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        context: CaptureContext,
        trained: tuple[bool, bool],
    ) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()
        out, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        ctx.context = context
        ctx.parameters = (weight if trained[0] else None, bias if trained[1] else None)
        ctx.affine = (weight, bias)
        ctx.save_for_backward(x, mean, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].contiguous()
        sink, layout = ctx.context.open(), ctx.context.layout
        x, mean, rstd = ctx.saved_tensors
        weight, bias = ctx.parameters
        flat = _flat(gradient)
        if weight is None:
            sink.tokens(bias, flat, layout, False)
        else:
            offsets = layout.offsets(flat.shape[0])
            scales, shifts = ops.affine_sums(flat, _flat(x), mean.reshape(-1), rstd.reshape(-1), offsets)
            sink.instances(weight, scales, layout)
            if bias is not None:
                sink.instances(bias, shifts, layout)
        back = None
        if ctx.needs_input_grad[0]:
            scale, shift = ctx.affine
            back, _, _ = torch.ops.aten.native_layer_norm_backward(
                gradient, x, x.shape[-1:], mean, rstd, scale, shift, [True, False, False]
            )
        return back, None, None, None, None, None


class ExpandUse(Use):
    """A parameter expanded to one copy a lane, ``[lanes, *shape]``: autograd then gives its gradient by lane.

    With so many ``between`` dimensions of size 1 behind the first.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, context: CaptureContext, between: int = 0) -> torch.Tensor:
        ctx.context, ctx.parameter, ctx.between = context, parameter, between
        return parameter.detach().expand(context.layout.lanes, *[1] * between, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient, parameter = gradients[0], ctx.parameter
        if ctx.between:
            gradient = gradient.reshape(-1, *parameter.shape)
        ctx.context.open().vector(parameter, gradient, ctx.context.layout)
        return None, None, None
