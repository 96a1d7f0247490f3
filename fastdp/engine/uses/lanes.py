"""Values computed from trained parameters alone, and what happens where they meet an activation.

Such a value is computed once, with a graph of its own back to the parameters. Where it meets an activation the engine takes
each unit's gradient of the *value*: as a factor pair where the value is a matrix that multiplies tokens, otherwise from one
copy of the value a row. That gradient then goes back to the parameters, unit by unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from fastdp.calls.batches import map_leaves, map_tensors, tensors
from fastdp.calls.named import functions, is_detach, is_in_place, is_metadata, operation
from fastdp.engine.errors import UnseenUse, UnsupportedUse
from fastdp.engine.uses.rows import BatchAxis, BroadcastLayout
from fastdp.engine.uses.selections import Selection
from fastdp.engine.uses.shared import SharedLanes, SharedProduct, SharedValue, pull_through
from fastdp.engine.uses.use import CaptureContext, EmbeddingUse, ExpandUse, expand_with_capture, operation_kind


class PerExampleParameter(torch.Tensor):
    """A tensor that looks like one parameter, or a value computed from parameters alone, and is one copy a lane.

    Code around it runs unchanged: operations among parameters act on the value, and where it first meets an activation the
    lanes are laid along the activation's rows. All lanes hold the same values; they differ only in which unit's gradient
    flows back into them. What an engine's own use returned has lanes alone, and operations act on each.
    """

    shared: SharedValue | None
    sources: tuple[torch.nn.Parameter, ...]
    context: CaptureContext
    _lanes: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        lanes: torch.Tensor | None,
        context: CaptureContext,
        shared: SharedValue | None = None,
        sources: tuple[torch.nn.Parameter, ...] = (),
    ) -> PerExampleParameter:
        if shared is not None:
            like, shape, sources = shared.value, shared.value.shape, shared.sources
        else:
            assert lanes is not None
            like, shape = lanes, lanes.shape[1:]
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        self._lanes, self.context, self.shared, self.sources = lanes, context, shared, sources
        return self

    @classmethod
    def of(cls, parameter: torch.nn.Parameter, context: CaptureContext) -> PerExampleParameter:
        """A parameter itself."""
        pulls = [lambda factors: [(parameter, factors)]] * (2 if parameter.dim() == 3 else 1)
        return cls(None, context, SharedValue(parameter, (parameter,), *pulls))

    @property
    def lanes(self) -> torch.Tensor:
        """One copy a lane, ``[lanes, *shape]``."""
        if self._lanes is None:
            shared = self.shared
            assert shared is not None
            if not shared.value.requires_grad:
                self._lanes = shared.value.expand(self.context.layout.lanes, *shared.value.shape)
            elif isinstance(shared.value, torch.nn.Parameter):
                self._lanes = ExpandUse.apply(shared.value, self.context)
            else:
                self._lanes = SharedLanes.apply(shared, self.context, *shared.sources)
        return self._lanes

    @property
    def single(self) -> torch.Tensor:
        """The value, once."""
        return self.lanes[0] if self.shared is None else self.shared.value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PerExampleParameter({list(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_metadata(func):
            first = args[0]
            if getattr(getattr(func, "__self__", None), "__name__", "") == "requires_grad":
                return first.single.requires_grad
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if is_detach(func) or (func in _CASTS and not isinstance(args[0], PerExampleParameter)):
            return _call(func, args, kwargs, lambda p: p.single)
        if not torch.is_grad_enabled() and not (is_in_place(func) and isinstance(args[0], PerExampleParameter)):
            # No gradient follows, as in a power iteration: this is a constant.
            return _call(func, args, kwargs, lambda p: p.single)
        return _apply(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UnsupportedUse(f"{func} of a parameter below torch's function layer")


#: Element-wise operations, for which a tensor of lanes is like any other.
_ELEMENTWISE = functions(
    "float bfloat16 half double to type_as add sub mul div neg exp sigmoid tanh rsub pow abs sqrt rsqrt square "
    "clone contiguous __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__ __pow__ "
    "add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__ masked_fill where maximum minimum "
    "true_divide addcmul lerp multiply subtract"
)
_CASTS = functions("to type_as")
#: Those that scale and shift in stock models.
_AFFINE = functions("add mul __add__ __radd__ __mul__ __rmul__ multiply")
#: Operations that take a laid-out parameter beside an activation as they would take a second activation.
_JOINS = frozenset({torch.cat, torch.concat, torch.concatenate, F.scaled_dot_product_attention})


def affine(
    func: Any, args: Any, kwargs: Any, trained: Mapping[int, str], context: CaptureContext, keep: Callable[..., None]
) -> Any:
    """A trained vector times, or plus, rows: copies of it, of which `Reads.keep` is told. Others give NotImplemented."""
    if func not in _AFFINE or kwargs or len(args) != 2:
        return NotImplemented
    own = int(id(args[1]) in trained)
    vector, x = args[own], args[1 - own]
    if id(vector) not in trained or type(x) is not torch.Tensor or context.layout.token_segments is not None:
        return NotImplemented
    if vector.dim() != 1 or x.dim() < 2 or x.shape[0] != context.layout.rows or not vector.requires_grad:
        return NotImplemented
    name = operation(func)
    met = Meeting.find_layout(name, frozenset((id(vector),)), x, context)
    if met is None or met.fold is None or not met.fold.natural:
        return NotImplemented
    rows = context.layout.rows
    keep((func, id(vector), x.shape, rows), operation_kind(name, x.shape, rows, met.fold))
    lanes = expand_with_capture(vector, x, context, x.dim() - 2)
    return func(x, lanes) if own else func(lanes, x)


def _apply(func: Any, args: Any, kwargs: Any) -> Any:
    given = list(tensors((args, kwargs)))
    found = [t for t in given if isinstance(t, PerExampleParameter)]
    plain = [t for t in given if not isinstance(t, PerExampleParameter)]
    context = found[0].context
    sources = tuple(dict.fromkeys(source for p in found for source in p.sources))
    meeting = Meeting.find(func, sources, plain, context)
    if meeting is not None:
        return _meet(func, args, kwargs, meeting)
    if is_in_place(func) and not isinstance(args[0], PerExampleParameter):
        raise UnsupportedUse(f"{operation(func)} of a parameter into a constant")
    if all(p.shared is not None for p in found):
        return _apply_to_values(func, args, kwargs, sources, context)
    if func in _ELEMENTWISE and all(t.dim() == 0 for t in plain) and len({p.dim() for p in found}) == 1:
        return PerExampleParameter(_call(func, args, kwargs, lambda p: p.lanes), context, sources=sources)
    mapped = _vmap(func, args, kwargs, lambda t: None)(0)
    return _wrap_results(mapped, lambda t: PerExampleParameter(t, context, sources=sources), func)


def _wrap_results(result: Any, wrap: Callable[[torch.Tensor], Any], func: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return wrap(result)
    if isinstance(result, (list, tuple)) and all(isinstance(r, torch.Tensor) for r in result):
        parts = [wrap(r) for r in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    raise UnsupportedUse(f"{operation(func)} of a parameter")


def _call(func: Any, args: Any, kwargs: Any, change: Callable[[PerExampleParameter], Any]) -> Any:
    """The operation with something else in the place of each value of parameters."""
    args, kwargs = map_tensors((args, kwargs), lambda t: change(t) if isinstance(t, PerExampleParameter) else t)
    return func(*args, **kwargs)


def _vmap(func: Any, args: Any, kwargs: Any, axis: Callable[[torch.Tensor], int | None]) -> Callable[[Any], Any]:
    """The operation lane by lane, as a function of the results' axis of lanes; ``axis`` says which axis of a plain tensor is."""
    given: list[torch.Tensor] = []
    axes: list[int | None] = []

    def take(tensor: torch.Tensor) -> torch.Tensor:
        lanes = isinstance(tensor, PerExampleParameter)
        given.append(tensor.lanes if isinstance(tensor, PerExampleParameter) else tensor)
        axes.append(0 if lanes else axis(tensor))
        return tensor

    map_tensors((args, kwargs), take)

    def one(*lane: torch.Tensor) -> Any:
        waiting = iter(lane)
        lane_args, lane_kwargs = map_tensors((args, kwargs), lambda _: next(waiting))
        return func(*lane_args, **lane_kwargs)

    def run(out: Any) -> Any:
        try:
            return torch.vmap(one, tuple(axes), out, randomness="different")(*given)
        except Exception as error:
            raise UnsupportedUse(f"{operation(func)}: {error}") from error

    return run


def _apply_to_values(
    func: Any, args: Any, kwargs: Any, sources: tuple[torch.nn.Parameter, ...], context: CaptureContext
) -> Any:
    """An operation among values of parameters and constants."""
    target = args[0] if is_in_place(func) else None
    # Lanes that are there already would not follow a change of the value.
    if isinstance(target, PerExampleParameter) and (
        target._lanes is not None or isinstance(target.single, torch.nn.Parameter)
    ):
        raise UnsupportedUse(f"{operation(func)} into a parameter")
    result = _call(func, args, kwargs, lambda p: p.single)
    if isinstance(target, PerExampleParameter):
        target.shared = SharedValue(target.single, sources)
        return None if result is None else target
    if isinstance(result, (bool, int, float)):
        return result
    parts, given = (
        itertools.count(),
        map_leaves(tuple(args), lambda _, t: t.shared if isinstance(t, PerExampleParameter) else t),
    )

    def wrap(value: torch.Tensor) -> PerExampleParameter:
        part = None if value is result else next(parts)
        pulls = (pull_through(func, given, kwargs, value, part, stacks=stacks) for stacks in (False, True))
        return PerExampleParameter(None, context, SharedValue(value, sources, *pulls))

    return _wrap_results(result, wrap, func)


@dataclass(frozen=True)
class Meeting:
    """How an operation on a value of parameters meets an activation.

    Args:
        context: of the pass.
        activation: the first of the arguments that carries rows.
        fold: where its rows lie.
        met: what the trace found.
        key: the operation, and the ids of the parameters that the values come from.
    """

    context: CaptureContext
    activation: torch.Tensor
    fold: BatchAxis | Selection
    met: BroadcastLayout = BroadcastLayout()
    key: tuple[str, frozenset[int]] = ("", frozenset())

    @classmethod
    def find(
        cls, func: Any, sources: tuple[torch.nn.Parameter, ...], plain: list[torch.Tensor], context: CaptureContext
    ) -> Meeting | None:
        """The meeting with the tensor of most dimensions that carries rows; tensors without are constants."""
        key = operation(func), frozenset(map(id, sources))
        for tensor in sorted(plain, key=torch.Tensor.dim, reverse=True):
            met = cls.find_layout(*key, tensor, context)
            if met is not None and met.fold is not None:
                return cls(context, tensor, context.selection(tensor) if met.fold.chosen else met.fold, met, key)
        return None

    @staticmethod
    def find_layout(
        name: str, sources: frozenset[int], tensor: torch.Tensor, context: CaptureContext
    ) -> BroadcastLayout | None:
        """What the trace found of a tensor's rows in an operation, and of its results'; None for a constant."""
        layout = context.layout
        if tensor.dim() == 0:
            return None
        met = layout.meetings.get((name, sources, tensor.dim()))
        if met is None:
            if tensor.numel() == 1:
                return None
            raise UnseenUse(f"{name} of a parameter and a tensor of {tensor.dim()} dimensions, unseen when traced")
        if met.problem is not None:
            raise UnsupportedUse(met.problem)
        fold = met.fold
        if fold is None or (not fold.chosen and layout.rows > 1 and tensor.shape[fold.axis] == 1):
            # One row is broadcast, whatever it is; only longer ones can be mistaken.
            return None
        context.note(name, tensor, fold)
        return met


def _meet(func: Any, args: Any, kwargs: Any, meeting: Meeting) -> Any:
    if func in _ELEMENTWISE or func in _JOINS:
        return _call(func, args, kwargs, lambda p: lay_along_rows(p, meeting))
    rule = _RULES.get(func)
    if rule is not None:
        out = rule(meeting, *args, **kwargs)
        if out is not NotImplemented:
            return out
    return _by_lane(func, args, kwargs, meeting)


def _by_lane(func: Any, args: Any, kwargs: Any, meeting: Meeting) -> Any:
    """Any other operation, with each row's part of the activations beside a copy of the parameters of its own."""
    layout = meeting.context.layout
    if layout.token_segments is not None or isinstance(meeting.fold, Selection):
        raise UnsupportedUse(f"{operation(func)} of a parameter and packed rows, or tokens that the data choose")
    axes: dict[int, int] = {}
    copies = iter(meeting.met.copies)

    def cut(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, PerExampleParameter):
            own = next(copies, None)
            if own is None or layout.rows == 1:
                return value
            return PerExampleParameter(_own_copy(value.lanes, own, layout.rows), value.context, sources=value.sources)
        met = Meeting.find_layout(*meeting.key, value, meeting.context)
        if met is None or met.fold is None:
            return value
        parts = met.fold.split(value, layout.rows)
        axes[id(parts)] = met.fold.axis
        return parts

    cut_args, cut_kwargs = map_tensors((args, kwargs), cut)
    run = _vmap(func, cut_args, cut_kwargs, lambda t: axes.get(id(t)))
    out = meeting.met.out
    if not out or None in out:
        raise UnsupportedUse(f"{operation(func)} of a parameter and an activation, with a result that has no rows")
    folds = [fold for fold in out if fold is not None]
    if len(folds) == 1:
        return folds[0].join(run(folds[0].axis))
    results = run(tuple(fold.axis for fold in folds))
    return tuple(fold.join(t) for fold, t in zip(folds, results))


def _own_copy(lanes: torch.Tensor, fold: BatchAxis, rows: int) -> torch.Tensor:
    """Of a value that the formula itself repeated for every row, the copies of a lane's own row: ``[lanes, ...]``."""
    return torch.diagonal(fold.split(lanes.movedim(0, -1), rows), 0, fold.axis, -1).movedim(-1, 0)


def lay_along_rows(value: PerExampleParameter, meeting: Meeting) -> torch.Tensor:
    """The lanes of a value laid along the rows of an activation; raises `UnsupportedUse` where they do not fit."""
    layout, fold, activation = meeting.context.layout, meeting.fold, meeting.activation
    lanes, shape, rank = value.lanes, value.shape, activation.dim()
    missing, size = rank - len(shape), activation.shape[fold.axis]
    if layout.token_segments is not None:
        # Behind the rows and their tokens.
        if missing < 2 or not fold.natural:
            raise UnsupportedUse(
                f"a parameter of shape {list(shape)} meets an activation of shape {list(activation.shape)}"
            )
        lanes = lanes.reshape(lanes.shape[0], *[1] * (missing - 2), *shape)
        return layout.spread(lanes, activation.shape)
    if fold.axis < missing:
        spread = fold.spread(lanes, size, layout.rows)
        return spread.reshape(*[1] * fold.axis, size, *[1] * (missing - fold.axis - 1), *shape)
    axis = fold.axis - missing
    if shape[axis] == 1:
        return fold.spread(lanes.squeeze(1 + axis), size, layout.rows).movedim(0, axis)
    if shape[axis] == size and not isinstance(fold, Selection):
        # The formula itself repeated the parameter for every row: each entry reads the copy of its own row's lane.
        own = BatchAxis(axis, fold.inner)
        return own.join(_own_copy(lanes, own, layout.rows).movedim(0, own.axis))
    raise UnsupportedUse(f"a parameter of shape {list(shape)} meets an activation of shape {list(activation.shape)}")


def _matmul(meeting: Meeting, input: Any, other: Any) -> Any:
    if isinstance(other, PerExampleParameter):
        return _product(meeting, input, other, None, swap=True)
    if input.dim() != 2 or other.dim() < 2 or isinstance(meeting.fold, Selection):
        return NotImplemented
    # W x is (x^T W^T)^T.
    rank = other.dim()
    swapped = {rank - 1: rank - 2, rank - 2: rank - 1}
    fold = BatchAxis(swapped.get(meeting.fold.axis, meeting.fold.axis), meeting.fold.inner)
    turned = replace(meeting, activation=other.mT, fold=fold)
    out = _product(turned, turned.activation, input, None, swap=False)
    return out if out is NotImplemented else out.mT


def _product(meeting: Meeting, x: Any, weight: Any, bias: Any, *, swap: bool) -> Any:
    """A matrix made of parameters times tokens: their factors are those of the matrix."""
    fold, context = meeting.fold, meeting.context
    if isinstance(x, PerExampleParameter) or x is not meeting.activation or fold.axis == x.dim() - 1:
        return NotImplemented
    shared = weight.shared if isinstance(weight, PerExampleParameter) else None
    if shared is None or weight.dim() != 2 or (isinstance(fold, Selection) and shared.pull is None):
        return NotImplemented
    out = SharedProduct.apply(x, shared, context, swap, fold, *shared.sources)
    if isinstance(fold, Selection):
        fold.follow(out)
    if isinstance(bias, PerExampleParameter):
        bias = lay_along_rows(bias, replace(meeting, activation=out))
    return out if bias is None else out + bias


def _getitem(meeting: Meeting, table: Any, index: Any) -> Any:
    """A lookup by what the data selected, as experts' biases are."""
    fold, shared = meeting.fold, table.shared if isinstance(table, PerExampleParameter) else None
    if not isinstance(fold, Selection) or shared is None or not isinstance(shared.value, torch.nn.Parameter):
        return NotImplemented
    if index is not meeting.activation or index.dim() != 1 or index.dtype != torch.long or shared.value.dim() != 2:
        return NotImplemented
    ids = fold.front(index, meeting.context.layout.rows)
    found = EmbeddingUse.apply(ids, shared.value, None, meeting.context, False, fold.unit_offsets(len(ids)))
    return fold.follow(fold.back(found))


def _setitem(meeting: Meeting, target: Any, index: Any, value: Any) -> Any:
    """Entries of an activation replaced by a value of parameters, as masked tokens are: each by the copy of its own row."""
    if (
        not isinstance(value, PerExampleParameter)
        or target is not meeting.activation
        or isinstance(meeting.fold, Selection)
    ):
        return NotImplemented
    if meeting.fold.axis >= target.dim():
        return NotImplemented
    while value.dim() and value.shape[0] == 1:
        value = value[0]
    parts = index if isinstance(index, tuple) else (index,)
    leads = all(isinstance(part, (torch.Tensor, slice, int)) for part in parts)
    taken = sum(part.dim() if isinstance(part, torch.Tensor) and part.dtype == torch.bool else 1 for part in parts)
    if not leads or taken + value.dim() > target.dim() or meeting.fold.axis + value.dim() >= target.dim():
        return NotImplemented
    target[index] = lay_along_rows(value, meeting).expand_as(target)[index].to(target.dtype)
    return None


_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: lambda meeting, input, weight, bias=None: _product(meeting, input, weight, bias, swap=False),
    **dict.fromkeys((torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__), _matmul),
    torch.Tensor.__setitem__: _setitem,
    torch.Tensor.__getitem__: _getitem,
}
