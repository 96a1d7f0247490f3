"""Values computed from trained parameters alone, and what happens where they meet an activation.

Such a value is computed once, with a graph of its own back to the parameters. Where it meets an activation the engine takes
each unit's gradient of the *value*: as a factor pair where the value is a matrix that multiplies tokens, otherwise from one
copy of the value a row. That gradient then goes back to the parameters, unit by unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

import fastdp.ops as ops
from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.factors import Factors
from fastdp.engine.rows import Fold, Met
from fastdp.engine.uses import ExpandUse, Sink, Tap, is_detach, is_metadata

#: Where the factors of a value's gradient go: to each parameter that the value is an indexing, a sum or a product of.
Pull = Callable[[Factors], list[tuple[torch.nn.Parameter, Factors]]]


@dataclass(frozen=True)
class Shared:
    """A value that is the same for all rows.

    Args:
        value: with a graph back to ``sources``, or without one where no gradient flows.
        sources: the parameters that it is computed from.
        pull: sends the factors of a matrix's gradient to the parameters without making the gradient; None if there is no
            such way.
    """

    value: torch.Tensor
    sources: tuple[torch.nn.Parameter, ...]
    pull: Pull | None = None

    def give_factors(self, sink: Sink, factors: Factors, tap: Tap) -> None:
        """Hand a sink the factors of a gradient of the value."""
        layout = tap.layout
        if self.pull is not None:
            for parameter, own in self.pull(factors):
                sink.matrix(parameter, own, layout)
            return
        left, right = factors.oriented
        gradients = ops.per_unit(left, right, layout.offsets(right.shape[0], laned=factors.laned))
        self._give(gradients.view(-1, *self.value.shape), lambda p, g: sink.instances(p, g, layout))

    def give_lanes(self, sink: Sink, gradients: torch.Tensor, tap: Tap) -> None:
        """Hand a sink gradients of the value by lane, ``[lanes, *shape]``."""
        self._give(gradients, lambda p, g: sink.vector(p, g, tap.layout))

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
        ctx: Any, x: torch.Tensor, shared: Shared, tap: Tap, swap: bool, fold: Fold, *sources: torch.Tensor
    ) -> torch.Tensor:
        ctx.tap, ctx.shared, ctx.swap, ctx.fold = tap, shared, swap, fold
        weight = shared.value.detach()
        ctx.x_dtype = x.dtype
        ctx.save_for_backward(x)
        return F.linear(x, weight.t() if swap else weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,), gradient = ctx.saved_tensors, gradients[0]
        ordered = (ctx.fold.front(t, ctx.tap.layout.rows) for t in (gradient, x))
        left, right = (t.reshape(-1, t.shape[-1]) for t in ordered)
        ctx.shared.give_factors(ctx.tap.open(), Factors(left, right, False, ctx.swap), ctx.tap)
        back = None
        if ctx.needs_input_grad[0]:
            weight = ctx.shared.value.detach()
            back = F.linear(gradient, weight if ctx.swap else weight.t()).to(ctx.x_dtype)
        return (back, None, None, None, None, *[None] * len(ctx.shared.sources))


class SharedLanes(torch.autograd.Function):
    """A value of parameters, one copy a lane."""

    @staticmethod
    def forward(ctx: Any, shared: Shared, tap: Tap, *sources: torch.Tensor) -> torch.Tensor:
        ctx.shared, ctx.tap = shared, tap
        return shared.value.detach().expand(tap.layout.lanes, *shared.value.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.shared.give_lanes(ctx.tap.open(), gradients[0], ctx.tap)
        return (None, None, *[None] * len(ctx.shared.sources))


class PerLane(torch.Tensor):
    """A tensor that looks like one parameter, or a value computed from parameters alone, and is one copy a lane.

    Code around it runs unchanged: operations among parameters act on the value, and where it first meets an activation the
    lanes are laid along the activation's rows. All lanes hold the same values; they differ only in which unit's gradient
    flows back into them. What an engine's own use returned has lanes alone, and operations act on each.
    """

    shared: Shared | None
    sources: tuple[torch.nn.Parameter, ...]
    tap: Tap
    _lanes: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        lanes: torch.Tensor | None,
        tap: Tap,
        shared: Shared | None = None,
        sources: tuple[torch.nn.Parameter, ...] = (),
    ) -> PerLane:
        if shared is not None:
            like, shape, sources = shared.value, shared.value.shape, shared.sources
        else:
            assert lanes is not None
            like, shape = lanes, lanes.shape[1:]
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        self._lanes, self.tap, self.shared, self.sources = lanes, tap, shared, sources
        return self

    @classmethod
    def of(cls, parameter: torch.nn.Parameter, tap: Tap) -> PerLane:
        """A parameter itself."""
        return cls(None, tap, Shared(parameter, (parameter,), lambda factors: [(parameter, factors)]))

    @property
    def lanes(self) -> torch.Tensor:
        """One copy a lane, ``[lanes, *shape]``."""
        if self._lanes is None:
            shared = self.shared
            assert shared is not None
            if not shared.value.requires_grad:
                self._lanes = shared.value.expand(self.tap.layout.lanes, *shared.value.shape)
            elif isinstance(shared.value, torch.nn.Parameter):
                self._lanes = ExpandUse.apply(shared.value, self.tap)
            else:
                self._lanes = SharedLanes.apply(shared, self.tap, *shared.sources)
        return self._lanes

    @property
    def laid_out(self) -> bool:
        """Whether there are lanes already, which would not follow a change of the value."""
        return self._lanes is not None

    @property
    def single(self) -> torch.Tensor:
        """The value, once."""
        return self.lanes[0] if self.shared is None else self.shared.value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PerLane({list(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_metadata(func):
            first = args[0]
            if getattr(getattr(func, "__self__", None), "__name__", "") == "requires_grad":
                return first.single.requires_grad
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if is_detach(func):
            return func(args[0].single, *args[1:], **kwargs)
        return _apply(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UnsupportedUse(f"{func} of a parameter below torch's function layer")


#: Element-wise operations, for which a tensor of lanes is like any other.
_ELEMENTWISE = frozenset(
    function
    for name in (
        "float bfloat16 half double to type_as add sub mul div neg exp sigmoid tanh rsub pow abs sqrt rsqrt square "
        "clone contiguous __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__ __pow__ "
        "add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__ masked_fill where maximum minimum "
        "true_divide addcmul lerp multiply subtract"
    ).split()
    for owner in (torch, torch.Tensor)
    if (function := getattr(owner, name, None)) is not None
)
#: Operations that take a laid-out parameter beside an activation as they would take a second activation.
_JOINS = frozenset({torch.cat, torch.concat, torch.concatenate, F.scaled_dot_product_attention})


def _functions(names: str, *owners: Any) -> frozenset[Any]:
    owners = owners or (torch, torch.Tensor)
    return frozenset(f for name in names.split() for owner in owners if (f := getattr(owner, name, None)) is not None)


#: These only choose and arrange entries of their first argument.
_INDEXING = _functions(
    "t transpose permute movedim moveaxis swapaxes swapdims adjoint __getitem__ narrow chunk split tensor_split select unbind "
    "index_select flip contiguous clone view reshape flatten unflatten squeeze unsqueeze"
) | {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
_SCALING = _functions("mul multiply __mul__ __rmul__ div true_divide __truediv__")
_ADDING = _functions("add __add__ __radd__")
_CASTING = _functions("to float double half bfloat16 type_as")
_JOINING = frozenset({torch.cat, torch.concat, torch.concatenate})
_PRODUCTS = _functions("matmul mm __matmul__")


def _apply(func: Any, args: Any, kwargs: Any) -> Any:
    found: list[PerLane] = []
    plain: list[torch.Tensor] = []

    def sort(value: Any) -> None:
        if isinstance(value, PerLane):
            found.append(value)
        elif isinstance(value, torch.Tensor):
            plain.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                sort(item)

    sort(list(args))
    sort(list(kwargs.values()))
    tap = found[0].tap
    sources = tuple(dict.fromkeys(source for p in found for source in p.sources))
    meeting = Meeting.found(func, sources, plain, tap)
    if meeting is not None:
        return _meet(func, args, kwargs, meeting)
    if _writes(func) and not isinstance(args[0], PerLane):
        raise UnsupportedUse(f"{operation(func)} of a parameter into a constant")
    if all(p.shared is not None for p in found):
        return _among(func, args, kwargs, sources, tap)
    if func in _ELEMENTWISE and all(t.dim() == 0 for t in plain) and len({p.dim() for p in found}) == 1:
        return PerLane(func(*_lanes(args), **_lanes(kwargs)), tap, sources=sources)
    if func is F.linear and isinstance(args[0], PerLane) and len(found) == 1:
        return PerLane(func(args[0].lanes, *args[1:], **kwargs), tap, sources=sources)
    mapped = _mapped(func, args, kwargs, lambda t: None)(0)
    return _of_results(mapped, lambda t: PerLane(t, tap, sources=sources), func)


def operation(func: Any) -> str:
    """The name under which an operation's meetings are recorded."""
    return getattr(func, "__name__", str(func))


def _writes(func: Any) -> bool:
    name = operation(func)
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _of_results(result: Any, wrap: Callable[[torch.Tensor], Any], func: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return wrap(result)
    if isinstance(result, (list, tuple)) and all(isinstance(r, torch.Tensor) for r in result):
        parts = [wrap(r) for r in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    raise UnsupportedUse(f"{operation(func)} of a parameter")


def _put(value: Any, change: Callable[[PerLane], Any]) -> Any:
    if isinstance(value, PerLane):
        return change(value)
    if isinstance(value, dict):
        return {k: _put(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_put(v, change) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _lanes(values: Any) -> Any:
    return _put(values, lambda p: p.lanes)


def _mapped(func: Any, args: Any, kwargs: Any, axis: Callable[[torch.Tensor], int | None]) -> Callable[[Any], Any]:
    """The operation lane by lane, as a function of the results' axis of lanes; ``axis`` says which axis of a plain tensor is."""
    given: list[torch.Tensor] = []
    axes: list[int | None] = []

    def take(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            lanes = isinstance(value, PerLane)
            given.append(value.lanes if isinstance(value, PerLane) else value)
            axes.append(0 if lanes else axis(value))
            return _Slot(len(given) - 1)
        if isinstance(value, dict):
            return {k: take(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [take(v) for v in value] if isinstance(value, list) else tuple(take(v) for v in value)
        return value

    slots, named = take(tuple(args)), take(kwargs)

    def one(*tensors: torch.Tensor) -> Any:
        def put(value: Any) -> Any:
            if isinstance(value, _Slot):
                return tensors[value.index]
            if isinstance(value, dict):
                return {k: put(v) for k, v in value.items()}
            if isinstance(value, (list, tuple)):
                return type(value)(put(v) for v in value)
            return value

        return func(*put(slots), **put(named))

    def run(out: Any) -> Any:
        try:
            return torch.vmap(one, tuple(axes), out, randomness="different")(*given)
        except Exception as error:
            raise UnsupportedUse(f"{operation(func)}: {error}") from error

    return run


@dataclass(frozen=True)
class _Slot:
    index: int


def _among(func: Any, args: Any, kwargs: Any, sources: tuple[torch.nn.Parameter, ...], tap: Tap) -> Any:
    """An operation among values of parameters and constants."""
    target = args[0] if _writes(func) else None
    if isinstance(target, PerLane) and (target.laid_out or isinstance(target.single, torch.nn.Parameter)):
        raise UnsupportedUse(f"{operation(func)} into a parameter")
    result = func(*_put(list(args), lambda p: p.single), **_put(kwargs, lambda p: p.single))
    if isinstance(target, PerLane):
        target.shared = Shared(target.single, sources)
        return None if result is None else target
    if isinstance(result, (bool, int, float)):
        return result
    parts = itertools.count()

    def wrap(value: torch.Tensor) -> PerLane:
        part = None if value is result else next(parts)
        return PerLane(None, tap, Shared(value, sources, _pull(func, args, kwargs, value, part)))

    return _of_results(result, wrap, func)


def _pull(func: Any, args: Any, kwargs: Any, result: torch.Tensor, part: int | None) -> Pull | None:
    """The way of factors through one operation, if they stay factors."""
    if result.dim() < 2 or not args:
        return None
    first = args[0]
    pulls = [a.shared.pull if isinstance(a, PerLane) and a.shared is not None else None for a in args[:2]]
    own = pulls[0]
    if func in _INDEXING and own is not None:
        return _through_index(own, func, first, args, kwargs, part)
    if func in _CASTING and own is not None:
        return own
    if len(args) < 2 and func not in _JOINING:
        return None
    if func in _JOINING:
        return _through_parts(first, args[1] if len(args) > 1 else kwargs.get("dim", 0))
    second = args[1]
    if func in _SCALING and own is not None and _scalar(second) and not kwargs:
        factor = second if func not in _functions("div true_divide __truediv__") else 1 / second
        return lambda f: own(replace(f, left=f.left * factor))
    if func in _ADDING and not kwargs:
        return _through_sum(args[:2], result)
    if func in _PRODUCTS or func is F.linear:
        if len(args) > 2 or kwargs or not all(isinstance(a, torch.Tensor) and a.dim() == 2 for a in args):
            return None
        return _through_product(args, pulls, transposed=func is F.linear)
    return None


def _scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (
        isinstance(value, torch.Tensor) and not isinstance(value, PerLane) and value.dim() == 0
    )


def _through_index(own: Pull, func: Any, first: PerLane, args: Any, kwargs: Any, part: int | None) -> Pull | None:
    """Through a choice of whole rows and columns, which are found by doing the same to their numbers."""
    if first.dim() < 2:
        return None
    shape, device = first.shape, first.device
    sizes = shape[0], shape[1:].numel()
    of_rows = torch.arange(sizes[0], device=device).view(-1, *[1] * (len(shape) - 1)).expand(shape)
    of_columns = torch.arange(sizes[1], device=device).view(1, *shape[1:]).expand(shape)
    done = [func(t, *args[1:], **kwargs) for t in (of_rows, of_columns)]
    rows, columns = (d if part is None else d[part] for d in done)
    rows, columns = rows.flatten(1), columns.flatten(1)
    swapped = not _constant(rows, 1)
    if swapped:
        rows, columns = rows.t(), columns.t()
    if not rows.numel() or not (_constant(rows, 1) and _constant(columns, 0)):
        return None
    chosen = [
        None if torch.equal(index, torch.arange(size, device=device)) else index
        for index, size in zip((rows[:, 0], columns[0]), sizes)
    ]

    def pull(factors: Factors) -> list[tuple[torch.nn.Parameter, Factors]]:
        given = reversed(factors.oriented) if swapped else factors.oriented
        first, second = (
            f if index is None else f.new_zeros(f.shape[0], size).index_add_(1, index, f)
            for f, index, size in zip(given, chosen, sizes)
        )
        return own(factors.moved(first, second, turned=swapped))

    return pull


def _constant(numbers: torch.Tensor, axis: int) -> bool:
    """Whether the numbers do not change along an axis."""
    return numbers.stride(axis) == 0 or torch.equal(numbers, numbers.narrow(axis, 0, 1).expand_as(numbers))


def _through_parts(parts: Any, dim: Any) -> Pull | None:
    """Through a concatenation of matrices: each has its own columns of one of the factors."""
    if not isinstance(parts, (list, tuple)) or not isinstance(dim, int):
        return None
    pulls = [p.shared.pull if isinstance(p, PerLane) and p.shared is not None else None for p in parts]
    if any(isinstance(p, PerLane) and pull is None for p, pull in zip(parts, pulls)):
        return None
    sizes, first = [p.shape[dim] for p in parts], dim % 2 == 0

    def pull(factors: Factors) -> list[tuple[torch.nn.Parameter, Factors]]:
        side = "left" if first != factors.swap else "right"
        cut = getattr(factors, side).split(sizes, dim=1)
        pairs = [own(replace(factors, **{side: piece})) for own, piece in zip(pulls, cut) if own is not None]
        return [pair for found in pairs for pair in found]

    return pull


def _through_sum(terms: Any, result: torch.Tensor) -> Pull | None:
    """Through a sum of matrices of one shape; constants take nothing."""
    pulls = []
    for term in terms:
        if not isinstance(term, PerLane):
            continue
        if term.shared is None or term.shared.pull is None or term.shape != result.shape:
            return None
        pulls.append(term.shared.pull)
    return lambda factors: [pair for own in pulls for pair in own(factors)]


def _through_product(args: Any, pulls: list[Pull | None], *, transposed: bool) -> Pull | None:
    """Through ``A B`` (or ``A B^T``): A takes (L, R B^T), B takes (A^T L, R)."""
    if any(isinstance(a, PerLane) and own is None for a, own in zip(args, pulls)):
        return None
    a, b = (t.single.detach() if isinstance(t, PerLane) else t for t in args)
    b = b.t() if transposed else b

    def pull(factors: Factors) -> list[tuple[torch.nn.Parameter, Factors]]:
        left, right = factors.oriented
        found = []
        if pulls[0] is not None:
            found += pulls[0](factors.moved(left, right @ b.t().to(right.dtype)))
        if pulls[1] is not None:
            inner = left @ a.to(left.dtype)
            pair = (right, inner) if transposed else (inner, right)
            found += pulls[1](factors.moved(*pair, turned=transposed))
        return found

    return pull


@dataclass(frozen=True)
class Meeting:
    """How an operation on a value of parameters meets an activation.

    Args:
        tap: of the pass.
        activation: the first of the arguments that carries rows.
        fold: where its rows lie.
        met: what the trace found.
        key: the operation, and the ids of the parameters that the values come from.
    """

    tap: Tap
    activation: torch.Tensor
    fold: Fold
    met: Met = Met()
    key: tuple[str, frozenset[int]] = ("", frozenset())

    @classmethod
    def found(
        cls, func: Any, sources: tuple[torch.nn.Parameter, ...], plain: list[torch.Tensor], tap: Tap
    ) -> Meeting | None:
        """The meeting with the tensor of most dimensions that carries rows; tensors without are constants."""
        key = operation(func), frozenset(map(id, sources))
        for tensor in sorted(plain, key=torch.Tensor.dim, reverse=True):
            met = cls.of(*key, tensor, tap)
            if met is not None and met.fold is not None:
                return cls(tap, tensor, met.fold, met, key)
        return None

    @staticmethod
    def of(name: str, sources: frozenset[int], tensor: torch.Tensor, tap: Tap) -> Met | None:
        """What the trace found of a tensor's rows in an operation, and of its results'; None for a constant."""
        layout = tap.layout
        if tensor.dim() == 0:
            return None
        met = layout.meetings.get((name, sources, tensor.dim()))
        if met is None:
            if tensor.numel() == 1:
                return None
            raise UnsupportedUse(f"{name} of a parameter and a tensor of {tensor.dim()} dimensions, unseen when traced")
        if met.problem is not None:
            raise UnsupportedUse(met.problem)
        if met.fold is None or (layout.rows > 1 and tensor.shape[met.fold.axis] == 1):
            # One row is broadcast, whatever it is; only longer ones can be mistaken.
            return None
        tap.note(name, tensor, met.fold)
        return met


def _meet(func: Any, args: Any, kwargs: Any, meeting: Meeting) -> Any:
    if func in _ELEMENTWISE or func in _JOINS:
        laid_out = [_put(list(args), lambda p: laid(p, meeting)), _put(kwargs, lambda p: laid(p, meeting))]
        return func(*laid_out[0], **laid_out[1])
    if not meeting.tap.any_formula:
        raise UnsupportedUse(f"{operation(func)} of a parameter and an activation")
    product = _PRODUCT_RULES.get(func)
    if product is not None:
        out = product(meeting, *args, **kwargs)
        if out is not NotImplemented:
            return out
    return _by_lane(func, args, kwargs, meeting)


def _by_lane(func: Any, args: Any, kwargs: Any, meeting: Meeting) -> Any:
    """Any other operation, with each row's part of the activations beside a copy of the parameters of its own."""
    layout = meeting.tap.layout
    if layout.token_segments is not None:
        raise UnsupportedUse(f"{operation(func)} of a parameter and packed rows")
    axes: dict[int, int] = {}
    copies = iter(meeting.met.copies)

    def cut(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(cut(v) for v in value)
        if isinstance(value, dict):
            return {k: cut(v) for k, v in value.items()}
        if isinstance(value, PerLane):
            own = next(copies, None)
            return (
                value
                if own is None or layout.rows == 1
                else PerLane(_own_copy(value.lanes, own, layout.rows), value.tap, sources=value.sources)
            )
        if not isinstance(value, torch.Tensor):
            return value
        met = Meeting.of(*meeting.key, value, meeting.tap)
        if met is None or met.fold is None:
            return value
        parts, axis = met.fold.split(value, layout.rows)
        axes[id(parts)] = axis
        return parts

    cut_args, cut_kwargs = cut(tuple(args)), cut(kwargs)
    run = _mapped(func, cut_args, cut_kwargs, lambda t: axes.get(id(t)))
    out = meeting.met.out
    if not out or None in out:
        raise UnsupportedUse(f"{operation(func)} of a parameter and an activation, with a result that has no rows")
    folds = [fold for fold in out if fold is not None]
    if len(folds) == 1:
        return folds[0].join(run(folds[0].lane_axis))
    results = run(tuple(fold.lane_axis for fold in folds))
    return tuple(fold.join(t) for fold, t in zip(folds, results))


def _own_copy(lanes: torch.Tensor, fold: Fold, rows: int) -> torch.Tensor:
    """Of a value that the formula itself repeated for every row, the copies of a lane's own row: ``[lanes, ...]``."""
    parts, axis = fold.split(lanes.movedim(0, -1), rows)
    return torch.diagonal(parts, 0, axis, -1).movedim(-1, 0)


def laid(value: PerLane, meeting: Meeting) -> torch.Tensor:
    """The lanes of a value laid along the rows of an activation; raises `UnsupportedUse` where they do not fit."""
    layout, fold, activation = meeting.tap.layout, meeting.fold, meeting.activation
    lanes, shape, rank = value.lanes, value.shape, activation.dim()
    missing, size = rank - len(shape), activation.shape[fold.axis]
    if layout.token_segments is not None:
        if missing < layout.leading or not fold.natural:
            raise UnsupportedUse(
                f"a parameter of shape {list(shape)} meets an activation of shape {list(activation.shape)}"
            )
        lanes = lanes.reshape(lanes.shape[0], *[1] * (missing - layout.leading), *shape)
        return layout.spread(lanes, activation.shape)
    if fold.axis < missing:
        spread = fold.spread(lanes, size, layout.rows)
        return spread.reshape(*[1] * fold.axis, size, *[1] * (missing - fold.axis - 1), *shape)
    axis = fold.axis - missing
    if shape[axis] == 1:
        return fold.spread(lanes.squeeze(1 + axis), size, layout.rows).movedim(0, axis)
    if shape[axis] == size:
        # The formula itself repeated the parameter for every row: each entry reads the copy of its own row's lane.
        own = Fold(axis, fold.inner)
        return own.join(_own_copy(lanes, own, layout.rows).movedim(0, own.lane_axis))
    raise UnsupportedUse(f"a parameter of shape {list(shape)} meets an activation of shape {list(activation.shape)}")


def _linear(meeting: Meeting, input: Any, weight: Any, bias: Any = None) -> Any:
    return _product(meeting, F.linear, input, weight, bias, swap=False)


def _matmul(meeting: Meeting, input: Any, other: Any) -> Any:
    if isinstance(other, PerLane):
        return _product(meeting, torch.matmul, input, other, None, swap=True)
    if input.dim() != 2 or other.dim() < 2:
        return NotImplemented
    # W x is (x^T W^T)^T.
    rank = other.dim()
    swapped = {rank - 1: rank - 2, rank - 2: rank - 1}
    fold = replace(meeting.fold, axis=swapped.get(meeting.fold.axis, meeting.fold.axis))
    turned = replace(meeting, activation=other.mT, fold=fold)
    out = _product(turned, torch.matmul, turned.activation, input, None, swap=False)
    return out if out is NotImplemented else out.mT


def _addmm(meeting: Meeting, input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if beta != 1 or alpha != 1 or isinstance(mat1, PerLane):
        return NotImplemented
    return _product(replace(meeting, activation=mat1), torch.matmul, mat1, mat2, input, swap=True)


def _product(meeting: Meeting, func: Any, x: Any, weight: Any, bias: Any, *, swap: bool) -> Any:
    """A matrix made of parameters times tokens: their factors are those of the matrix."""
    fold, tap = meeting.fold, meeting.tap
    if isinstance(x, PerLane) or x is not meeting.activation or fold.axis == x.dim() - 1:
        return NotImplemented
    if isinstance(weight, PerLane):
        if weight.shared is None or weight.dim() != 2:
            return NotImplemented
        shared = weight.shared
        out = SharedProduct.apply(x, shared, tap, swap, fold, *shared.sources)
    else:
        out = func(x, weight)
    if bias is None:
        return out
    if isinstance(bias, PerLane):
        return out + laid(bias, replace(meeting, activation=out))
    return out + bias


_PRODUCT_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.addmm, torch.Tensor.addmm), _addmm),
}
