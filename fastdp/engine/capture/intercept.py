"""Patched forwards: where a module reads a trained parameter, the read is replaced by a use that captures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fastdp.calls.batches import map_tensors, tensors
from fastdp.calls.composite import opened
from fastdp.calls.named import is_detach, is_metadata
from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.rules import bags, convolution, experts, norms, products, recurrent
from fastdp.engine.uses.lanes import Meeting, PerExampleParameter, affine, lay_along_rows
from fastdp.engine.uses.reads import Reads
from fastdp.engine.uses.rows import BatchAxis
from fastdp.engine.uses.selections import Selection
from fastdp.engine.uses.use import (
    CaptureContext,
    EmbeddingUse,
    expand_with_capture,
    layer_norm_with_capture,
    operation_kind,
)


class UseMode(TorchFunctionMode):
    """Active inside the modules that read trained parameters, during training forwards only."""

    def __init__(self, reads: Reads, context: CaptureContext):
        super().__init__()
        self.reads = reads
        self.context = context
        #: Parameters that were read as they are, by a rule or entry by entry; and whether anything else may have read one.
        self.met: set[int] = set()
        self.else_read = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads_values, inside = _classify(getattr(func, "func", func))  # the cache would keep a partial's pass alive
        if not (reads_values and torch.is_grad_enabled()):
            return func(*args, **kwargs)
        if inside is not None:
            self.else_read = True
            with self:
                return inside(*args, **kwargs)
        given, names = [*args, *kwargs.values()], self.reads.names
        read = names.keys() & set(map(id, given))
        # Most of what runs beside a parameter's own operation reads none.
        if func not in _HANDLERS and not (read or any(map(_may_hold, given))):
            return func(*args, **kwargs)
        self.met |= read
        result = affine(func, args, kwargs, names, self.context, self.reads.keep)
        if result is not NotImplemented:
            return result
        result = _apply_rule(self.reads, self.context, func, args, kwargs)
        # What a rule makes of a parameter alone goes on to others as that.
        self.else_read |= type(result) is not torch.Tensor or any(map(_may_hold, given))
        if result is not NotImplemented:
            return result
        args, kwargs = map_tensors(
            (args, kwargs),
            lambda t: PerExampleParameter.of(t, self.context) if id(t) in names else t,  # type: ignore[arg-type]
        )
        return func(*args, **kwargs)


class ParameterProxy(torch.Tensor):
    """A trained parameter in its module's hands during a forward pass: what is made of it goes where `UseMode` sends it.

    Nothing else of the module's is intercepted, so it serves where a mode has seen that each is read by a rule, or meets an
    activation entry by entry.
    """

    reads: Reads
    parameter: torch.nn.Parameter
    #: What torch takes a parameter by.
    _is_param = True

    @classmethod
    def of(cls, parameter: torch.nn.Parameter, reads: Reads) -> ParameterProxy:
        """A parameter, for its module."""
        held = parameter.detach().as_subclass(cls)
        held.reads, held.parameter = reads, parameter
        return held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(args) == 2 and not kwargs:
            own = int(type(args[1]) is cls)
            held, x = args[own], args[1 - own]
            if type(held) is cls and type(x) is torch.Tensor:
                reads, vector = held.__dict__["reads"], held.__dict__["parameter"]
                context = reads.context
                found = context and reads.known.get((func, id(vector), x.shape, context.layout.rows))
                if found and torch.is_grad_enabled() and context.layout.token_segments is None:
                    context.shapes.add(found)
                    lanes = expand_with_capture(vector, x, context, x.dim() - 2)
                    return func(x, lanes) if own else func(lanes, x)
        reads = next(value for value in tensors((args, kwargs or {})) if type(value) is cls).__dict__["reads"]
        args, kwargs = [*map(_unwrap, args)], {name: _unwrap(value) for name, value in kwargs.items()} if kwargs else {}
        if reads.context is None:
            return func(*args, **kwargs)
        return UseMode(reads, reads.context).__torch_function__(func, types, args, kwargs)


def _unwrap(value: Any) -> Any:
    """The same nesting with parameters in the place of those held."""
    if type(value) is ParameterProxy:
        return value.__dict__["parameter"]
    return type(value)(map(_unwrap, value)) if type(value) in (list, tuple) else value


def _may_hold(value: Any) -> bool:
    """Whether a value is made of parameters, or may have some in it."""
    return isinstance(value, PerExampleParameter) or (
        isinstance(value, (list, tuple)) and not all(isinstance(v, int) for v in value)
    )


@functools.lru_cache(1 << 12)
def _classify(func: Any) -> tuple[bool, Any]:
    """Whether a torch function makes something of values that a gradient follows, and the code of one that is made of others."""
    return not (is_metadata(func) or is_detach(func)), opened(func)


def _apply_rule(reads: Reads, context: CaptureContext, func: Any, args: Any, kwargs: Any) -> Any:
    """The use that an operation is; NotImplemented for one that no rule serves: it goes lane by lane, if the trace saw it."""
    handler = _HANDLERS.get(func)
    if handler is None:
        return NotImplemented
    try:
        return handler(reads, context, *args, **kwargs)
    except UnsupportedUse:
        return NotImplemented


def _torch_forward(kind: type[torch.nn.Module]) -> Any:
    """The forward of one of torch's own modules, if it is torch's; others may have put theirs in its place."""
    forward: Any = kind.forward
    code = getattr(forward, "__code__", None)
    return forward if code is not None and code.co_filename == inspect.getfile(kind) else None


def _convolution_of(module: Any, reads: Reads, context: CaptureContext, x: torch.Tensor) -> Any:
    if module.padding_mode != "zeros":
        return NotImplemented
    rest = module.stride, module.padding, module.dilation, module.groups
    return _HANDLERS[getattr(F, type(module).__name__.lower())](reads, context, x, module.weight, module.bias, *rest)


def _embedding_of(module: torch.nn.Embedding, reads: Reads, context: CaptureContext, ids: torch.Tensor) -> Any:
    weight, layout = module.weight, context.layout
    found = reads.known.get((F.embedding, id(weight), ids.shape, layout.rows))
    if found is None or layout.token_segments is not None or module.max_norm is not None or module.scale_grad_by_freq:
        rest = module.padding_idx, module.max_norm, module.norm_type, module.scale_grad_by_freq, module.sparse
        return _embedding(reads, context, ids, weight, *rest)
    context.shapes.add(found)
    return EmbeddingUse.apply(ids, weight, module.padding_idx, context, False)


#: Forwards of torch's own modules, and the uses that these are on one tensor, as their code says.
_CALLS: dict[type[torch.nn.Module], tuple[Any, Callable[[Any, Reads, CaptureContext, torch.Tensor], Any]]] = {
    torch.nn.Linear: (_torch_forward(torch.nn.Linear), products.linear_of),
    torch.nn.LayerNorm: (
        _torch_forward(torch.nn.LayerNorm),
        lambda of, reads, context, x: _layer_norm(reads, context, x, of.normalized_shape, of.weight, of.bias, of.eps),
    ),
    **{kind: (_torch_forward(kind), _convolution_of) for kind in (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)},
    torch.nn.Embedding: (_torch_forward(torch.nn.Embedding), _embedding_of),
}


def use_of_module(module: torch.nn.Module) -> Callable[[Any, Reads, CaptureContext, torch.Tensor], Any] | None:
    """What finds the use that a call of one of torch's own modules is, without following its code; None for others."""
    forward, use_of = _CALLS.get(type(module), (None, None))
    return use_of if type(module).forward is forward else None


def _embedding(
    reads: Reads,
    context: CaptureContext,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not reads.is_trained(weight):
        return NotImplemented
    reads.refuse_coupled_table(weight, max_norm, scale_grad_by_freq)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    fold = reads.fold("embedding", weight, input, context)
    if fold is not None:
        ids = fold.front(input, context.layout.rows)
        if fold.natural:
            rows = context.layout.rows
            kind = operation_kind("embedding", input.shape, rows, fold)
            reads.keep((F.embedding, id(weight), input.shape, rows), kind)
        found = EmbeddingUse.apply(ids, weight, padding_idx, context, False, fold.unit_offsets(ids.numel()))
        if isinstance(fold, Selection):
            return fold.follow(fold.back(found))
        return found if fold.natural else fold.back(found).contiguous()
    ids = input.expand(context.layout.lanes, *input.shape)
    return PerExampleParameter(EmbeddingUse.apply(ids, weight, padding_idx, context, True), context, sources=(weight,))


def _layer_norm(
    reads: Reads,
    context: CaptureContext,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    if not reads.serve(weight, bias):
        return NotImplemented
    if len(normalized_shape) != 1:
        raise UnsupportedUse("layer_norm over several dimensions")
    reads.require_rows("layer_norm", (weight, bias), input, context)
    trained = (reads.is_trained(weight), reads.is_trained(bias))
    return layer_norm_with_capture(input, weight, bias, eps, context, trained)


def _rms_norm(
    reads: Reads, context: CaptureContext, input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None
) -> Any:
    if not reads.is_trained(weight):
        return NotImplemented
    reads.require_rows("rms_norm", (weight,), input, context)
    normed = F.rms_norm(input, normalized_shape, None, eps)
    return normed * lay_along_rows(PerExampleParameter.of(weight, context), Meeting(context, normed, BatchAxis()))


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    **bags.HANDLERS,
    **convolution.HANDLERS,
    **experts.HANDLERS,
    **norms.HANDLERS,
    **recurrent.HANDLERS,
    **products.HANDLERS,
}

#: The name under which each handled operation is recorded, keyed by torch's function.
OPERATIONS = {
    function: getattr(handler, "__name__", function.__name__).lstrip("_") for function, handler in _HANDLERS.items()
}


def operand(function: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """The input of a handled operation, whose axes say what the parameter is applied to."""
    handler = _HANDLERS[function]
    own: Callable[..., torch.Tensor] | None = getattr(getattr(handler, "func", handler), "operand", None)
    if own is not None:
        return own(*args, **kwargs)
    bound = inspect.signature(handler).bind(None, None, *args, **kwargs)
    given: torch.Tensor = bound.arguments["mat1" if OPERATIONS[function] == "addmm" else "input"]
    return given


class PlainHeads(TorchFunctionMode):
    """Leaves out the logits of heads in a pass of the plain model."""

    def __init__(self, reads: Reads):
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._linear if func is F.linear else func)(*args, **(kwargs or {}))

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> Any:
        product, heads = functools.partial(F.linear, input, weight, bias), self.reads.heads
        return heads.leave_out(input, weight, bias, product) if id(weight) in heads.weights else product()
