"""Gradients between `backward()` and `step()`: zeros that say once that they are none yet, and what weights get directly."""

from __future__ import annotations

import os
import re
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fastdp.calls.batches import map_tensors, tensors
from fastdp.calls.errors import SelfCheckError
from fastdp.calls.named import is_detach, is_metadata
from fastdp.distributed.pieces import is_dtensor

#: Models whose loops were warned.
_WARNED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_OWN_FILES = os.path.dirname(torch.__file__), __file__
_UNSCALES = "_amp_foreach_non_finite_check_and_unscale_"
#: Names of functions that write into their first argument, as clipping does.
_IN_PLACE = re.compile(r".*[^_]_|__(setitem|i(add|sub|mul|truediv|floordiv|mod|pow))__")
#: Norms over all entries, where no axis is named.
_NORMS = frozenset(("norm", "vector_norm", "linalg_vector_norm", "_foreach_norm"))
_SCALED = (
    "GradScaler would scale each example's gradient, as the loss is outside the model. Use autocast to bfloat16 without it, or "
    "GradScaler(enabled=False)."
)
_DEPENDS = (
    "The loop's loss reads weights beside the model by what changes between batches. Do so inside forward(); let a penalty's "
    "factor follow private.steps_done."
)


class PendingGradient(torch.Tensor):
    """Stands in a parameter's ``.grad`` until its optimizer's step: zeros, which nothing can write into."""

    pending: PendingGradients

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tensors((args, kwargs or {})) if isinstance(t, PendingGradient)]
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if is_metadata(func) or not given:
                return func(*args, **(kwargs or {}))
            given[0].pending.warn_once(name)
            if is_detach(func) and name not in ("numpy", "item"):
                return given[0]
            if _IN_PLACE.fullmatch(name) and next(iter(tensors(args)), None) is given[0]:
                return given[0] if args[0] is given[0] else None
            # The norm of one zero is that of many.
            takes_all_entries = name in _NORMS and not kwargs and len(args) < 3 and not isinstance(args[-1], str)
            one_entry = takes_all_entries and all(t.numel() for t in given)

            def plain(t: torch.Tensor) -> torch.Tensor:
                if not isinstance(t, PendingGradient):
                    return t
                own = t.as_subclass(torch.Tensor)
                return own.reshape(-1)[:1] if one_entry else own

            return func(*map_tensors(args, plain), **map_tensors(kwargs or {}, plain))


class PendingGradients:
    """The pending gradients of a model's trained parameters; its loop is warned of them once.

    ``scaled`` says whether what multiplies the loss reaches the gradients of examples, as it does outside the model.
    """

    def __init__(self, model: torch.nn.Module, parameters: Iterable[torch.nn.Parameter], *, scaled: Callable[[], bool]):
        self._model, self._scaled = weakref.ref(model), scaled
        self._parameters = list(parameters)
        self._gradients: list[PendingGradient] | None = None
        #: Whether some parameter may hold one: at first one of an earlier run.
        self.placed = True
        self._handles: dict[int, Any] = {}

    def place(self) -> bool:
        """Let every parameter without a gradient have a pending one; parameters in pieces have none.

        Returns whether a parameter has another gradient; then none is pending.
        """
        self.placed = True
        try:
            return self._place() and self.clear()
        except RuntimeError:
            # A parameter was resized, cast or moved.
            self._gradients = list(map(self._zeros, self._parameters))
            return self._place() and self.clear()

    def _place(self) -> bool:
        others = False
        if self._gradients is None:
            self._gradients = [] if any(map(is_dtensor, self._parameters)) else list(map(self._zeros, self._parameters))
        for index, (parameter, pending) in enumerate(zip(self._parameters, self._gradients)):
            gradient = parameter.grad
            if gradient is not None:
                others |= not isinstance(gradient, PendingGradient)
            elif parameter.requires_grad:
                parameter.grad = pending
                if index not in self._handles:
                    self._handles[index] = parameter.register_hook(partial(_make_way, weakref.ref(parameter)))
        return others

    def clear(self) -> bool:
        """Take them away, those of an earlier run too; whether a parameter has another gradient."""
        self.placed = others = False
        for parameter in self._parameters:
            if (gradient := parameter.grad) is not None:
                if isinstance(gradient, PendingGradient):
                    parameter.grad = None
                else:
                    others = True
        return others

    def remove(self) -> None:
        """The same for good."""
        self.clear()
        while self._handles:
            self._handles.popitem()[1].remove()

    def warn_once(self, function: str) -> None:
        """Warn that gradients come at ``step()``. Raises ValueError for a GradScaler that reaches those of examples."""
        if function == _UNSCALES and self._scaled():
            raise ValueError(_SCALED)
        model = self._model()
        if model is None or model in _WARNED:
            return
        _WARNED.add(model)
        message = (
            "GradScaler has no effect: private gradients are not scaled. Use autocast to bfloat16, as small gradients vanish in "
            "float16."
            if function == _UNSCALES
            else "Gradients are zeros before step(), and clip_grad_norm_ has no effect: per-example clipping (max_grad_norm) "
            "replaces it. Log norms after step()."
        )
        frames = [frame.filename for frame in reversed(traceback.extract_stack())]
        level = next((i for i, name in enumerate(frames, 1) if not name.startswith(_OWN_FILES)), 1)
        warnings.warn(message, stacklevel=level)

    def _zeros(self, parameter: torch.nn.Parameter) -> PendingGradient:
        zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        made = zero.expand(parameter.shape).as_subclass(PendingGradient)
        made.pending = self
        return made


class WeightPenalty:
    """The gradient that a loop's loss gives weights directly, as an L2 penalty does: added to a release after its noise.

    It must follow from the weights alone: all backward passes between two releases have to bring the same, those of probe
    batches too, which hold other examples.

    Attributes:
        expected: whether the first backward pass went to weights beside the model.
        waits: whether something has come that no second batch has confirmed yet.
    """

    def __init__(self) -> None:
        self.expected = self.waits = self._verified = False
        self._parameters: Sequence[torch.nn.Parameter] = ()
        #: By a parameter's number: what this backward pass has brought, and what the first since the latest release did.
        self._arrived: dict[int, torch.Tensor] = {}
        self._first: dict[int, torch.Tensor] | None = None
        self._handles: list[Any] = []

    def begin(self, parameters: Sequence[torch.nn.Parameter], own: Callable[[], bool]) -> None:
        """Expect one from now on; ``own`` says whether a backward pass is not the loop's."""
        self.expected, self._parameters, me = True, parameters, weakref.ref(self)
        self._arrived = {index: p.grad for index, p in enumerate(parameters) if p.grad is not None}
        self._handles = [p.register_hook(partial(_arrive, me, own, index)) for index, p in enumerate(parameters)]

    def take(self) -> None:
        """Take off `.grad` what this backward pass has brought so far."""
        for index in self._arrived:
            self._parameters[index].grad = None

    def settle(self, weight: float) -> bool:
        """Keep what a backward pass has brought, whose loss the loop multiplied by ``weight``; whether it `waits`.

        Raises `SelfCheckError` if another pass brought something else since the latest release.
        """
        self.take()
        arrived, self._arrived = {i: g / weight for i, g in self._arrived.items() if g.any()}, {}
        if self._first is None:
            self._first, self.waits = arrived, bool(arrived) and not self._verified
            return self.waits
        first = self._first
        if first.keys() != arrived.keys() or not all(torch.equal(first[i], g) for i, g in arrived.items()):
            raise SelfCheckError(_DEPENDS)
        self._verified |= self.waits
        self.waits = False
        return False

    def add(self) -> None:
        """Add it to the released gradients."""
        for index, gradient in (self._first or {}).items():
            released = self._parameters[index].grad
            if released is not None:
                released.add_(gradient)
        self.forget()

    def forget(self) -> None:
        """Drop what the backward passes of this logical batch have brought."""
        self._first, self._arrived, self.waits = None, {}, False

    def remove(self) -> None:
        """Expect none any more."""
        while self._handles:
            self._handles.pop().remove()


def _arrive(penalty: weakref.ref[WeightPenalty], own: Callable[[], bool], index: int, gradient: torch.Tensor) -> None:
    """A hook of a parameter's: what arrives is the loop's where ``own`` does not say otherwise."""
    expecting = penalty()
    if expecting is None or own():
        return
    before = expecting._parameters[index].grad
    # A gradient that was not reset is no part of it.
    if before is None or isinstance(before, PendingGradient) or not before.any():
        expecting._arrived[index] = gradient


def users_hooks(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, list[Callable[[torch.Tensor], Any]]]:
    """Hooks that the user registered on the gradients of parameters, the first first, by the parameter's name."""
    found: dict[str, list[Callable[[torch.Tensor], Any]]] = {}
    for name, parameter in parameters.items():
        for hook in (parameter._backward_hooks or {}).values():
            if not getattr(getattr(hook, "func", None), "__module__", "").startswith("fastdp."):
                found.setdefault(name, []).append(hook)
    return found


def _make_way(parameter: weakref.ref[torch.nn.Parameter], _gradient: torch.Tensor) -> None:
    """Take a pending gradient away, as torch adds one that a loop's own backward pass sends here in place."""
    own = parameter()
    if own is not None and isinstance(own.grad, PendingGradient):
        own.grad = None
