"""Forwards in the place of modules' own, for as long as the engine is open: a reader's, and that of the whole model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fastdp.calls.batches import RowLists
from fastdp.distributed.shards import UnshardedParameters
from fastdp.engine.capture.intercept import ParameterProxy, PlainHeads, UseMode, use_of_module
from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.uses.reads import Reads


class _Forward:
    """Stands in a module's ``forward`` attribute. No other attribute is replaced, so state-dict keys stay what they were."""

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self.had_own = "forward" in module.__dict__
        self.given: Callable[..., Any] = module.forward
        self.original = self.plain = self.given
        # Signature-driven callers (Trainer's column removal) look at `forward`.
        functools.update_wrapper(self, self.plain, updated=())
        self.place()

    def place(self) -> None:
        """Take the attribute."""
        self.module.forward = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError  # each kind has its own

    def remove(self) -> None:
        """Give the module its own forward back."""
        if self.had_own:
            self.module.forward = self.given  # type: ignore[method-assign]
        else:
            self.module.__dict__.pop("forward", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the model is a plain model: its own class's forward, bound to the copied module.
        return functools.partial(type(self.module).forward, memo[id(self.module)])

    def __reduce__(self) -> Any:
        return functools.partial, (type(self.module).forward, self.module)


class PatchedForward(_Forward):
    """The forward of a module that reads trained parameters: opens a `UseMode` while the engine records."""

    def __init__(self, module: torch.nn.Module, reads: Reads, name: str = ""):
        super().__init__(module)
        self.reads, self.name = reads, name
        #: What finds the use that a call is, where the module is torch's own.
        self._use = None if self.had_own else use_of_module(module)
        self._class_forward = type(module).forward
        #: Its parameters, once a mode has seen that nothing else of it reads any, and how it holds them in a pass; by name.
        self.held: dict[str, torch.nn.Parameter] = {}
        self.proxies: dict[str, ParameterProxy] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = self.reads.context
        if context is not None and not torch.is_grad_enabled():
            context.whole = True
        selected = context.selected if context is not None and self.name in self.reads.selecting else None
        if selected is not None and not selected.is_open:
            with selected:
                return self(*args, **kwargs)
        if self.reads.mode_open or (context is None and not self.reads.heads.plainly):
            return self.original(*args, **kwargs)
        if context is not None and not self.had_own and not torch.compiler.is_compiling():
            plain = len(args) == 1 and type(args[0]) is torch.Tensor and not kwargs and torch.is_grad_enabled()
            if self._use is not None and plain and type(self.module).forward is self._class_forward:
                try:
                    result = self._use(self.module, self.reads, context, args[0])
                except UnsupportedUse:
                    result = NotImplemented
                if result is not NotImplemented:
                    return result
            for name, parameter in self.held.items():
                # A model may have been given another one since.
                if self.module._parameters.get(name) is not parameter:
                    self.held = {}
                    break
            if self.held:
                return self._call_with_proxies(args, kwargs)
        self.reads.mode_open = True
        mode = PlainHeads(self.reads) if context is None else UseMode(self.reads, context)
        try:
            with mode:
                return self.original(*args, **kwargs)
        finally:
            self.reads.mode_open = False
            if isinstance(mode, UseMode) and not mode.else_read:
                own = {name: p for name, p in self.module._parameters.items() if p is not None and id(p) in mode.met}
                if len(own) == len(mode.met):
                    self.held, self.proxies = own, {name: ParameterProxy.of(p, self.reads) for name, p in own.items()}

    def _call_with_proxies(self, args: Any, kwargs: Any) -> Any:
        """The module's own forward, with its parameters held so that what reads them is known."""
        own: dict[str, Any] = self.module._parameters
        own.update(self.proxies)
        try:
            return self.original(*args, **kwargs)
        finally:
            own.update(self.held)


class RootForward(_Forward):
    """The model's forward: ``train`` of its arguments while it ``trains``."""

    def __init__(
        self, model: torch.nn.Module, train: Callable[[Any, Any], Any], trains: Callable[[], bool], lists: RowLists
    ):
        super().__init__(model)
        self._trains, self._given_order, given = trains, lists.as_given, self.given

        def plain(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = lists.decode((args, kwargs))
            return given(*args, **kwargs)

        self.original = self.plain = plain
        # A compiler of the whole model would follow the engine into each of its checks; blocks may be compiled, each by itself.
        self._train = torch.compiler.disable(train)

    def wrap(self, patch: PatchedForward | None) -> None:
        """Have a patch intercept the root's own reads of parameters, or none; its call still goes through the engine."""
        if patch is not None:
            patch.original = self.plain
        self.original = patch or self.plain
        self.place()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._given_order(self._train(args, kwargs)) if self._trains() else self.given(*args, **kwargs)


class RootCall:
    """A call of a model whose weights are in pieces, through the engine while training.

    Torch gathers them in hooks, which must run in every pass that the engine makes: so it enters before any hook.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        train: Callable[[Any, Any], Any],
        trains: Callable[[], bool],
        weights: UnshardedParameters,
    ):
        self.model = model
        self.plain: Callable[..., Any] = weights.running(model._call_impl)
        self.original = self.plain
        self._compiled_call = model._compiled_call_impl
        train = torch.compiler.disable(train)

        def call(*args: Any, **kwargs: Any) -> Any:
            return train(args, kwargs) if trains() else self.plain(*args, **kwargs)

        model._compiled_call_impl = call

    def remove(self) -> None:
        """The model's own calls again."""
        self.model._compiled_call_impl = self._compiled_call


class Forwards:
    """Which forwards of a model's modules stand aside for the engine's.

    Args:
        model: theirs.
        reads: what patched ones record.
        train: takes the arguments of the model's own call while it ``trains``.
        weights: the model's.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        reads: Reads,
        train: Callable[[Any, Any], Any],
        trains: Callable[[], bool],
        weights: UnshardedParameters,
    ):
        self._model, self._reads = model, reads
        self._patches: dict[str, PatchedForward] = {}
        self.lists = RowLists()
        self.root: RootForward | RootCall = (
            RootCall(model, train, trains, weights) if weights.cut else RootForward(model, train, trains, self.lists)
        )

    def patch(self, modules: Iterable[str]) -> None:
        """Have reads of trained parameters in these modules recorded."""
        named = dict(self._model.named_modules())
        for name in modules:
            if name not in self._patches:
                patch = self._patches[name] = PatchedForward(named[name], self._reads, name)
                if not name and isinstance(self.root, RootForward):
                    self.root.wrap(patch)

    def leave_out(self, heads: Mapping[str, torch.nn.Parameter]) -> None:
        """Have the logits of these modules' matrices left out."""
        self.patch(name for name in heads if name)
        self._reads.heads.weights |= {id(weight): weight for name, weight in heads.items() if name}

    def unpatch(self) -> None:
        """Modules' own forwards again; the model's own call still goes through the engine."""
        for patch in self._patches.values():
            patch.remove()
        self._patches.clear()
        self._reads.heads.weights.clear()
        if isinstance(self.root, RootForward):
            self.root.wrap(None)

    def close(self) -> None:
        """Everything as it was."""
        self.unpatch()
        self.root.remove()
