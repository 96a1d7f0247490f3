"""Passes that leave no mark on a model or a random state, and passes without randomness."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fastdp.engine.trace import devices


@contextmanager
def unchanged(model: torch.nn.Module, *, memory: bool = True) -> Iterator[None]:
    """Puts back what modules hold beside parameters, written or replaced, and every random state, when closed.

    Without ``memory`` attributes stay, and buffers that no state dict has, so that the next pass shows whether it goes by them:
    then another one has to be open around all of these.
    """
    state, numpy = random.getstate(), sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=devices(model)), forgetting(model, memory=memory, persistent=True):
            yield
    finally:
        random.setstate(state)
        if numpy is not None and drawn is not None:
            numpy.random.set_state(drawn)


#: What the engine itself puts into a module while it looks at one.
_OURS = frozenset({"forward"})


@contextmanager
def forgetting(
    model: torch.nn.Module, *, memory: bool = True, persistent: bool = False
) -> Iterator[Callable[[], None]]:
    """Puts back modules' attributes and buffers when closed, and whenever what it yields is called.

    ``memory`` are attributes and buffers that no state dict has, ``persistent`` the others. Position embeddings that stretch
    with the longest text so far keep its length in an attribute and their frequencies in a buffer: a record that stays there
    would be in every later one's loss.
    """
    own: list[tuple[torch.nn.Module, dict[str, Any], dict[str, torch.Tensor | None]]] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in model.modules():
        kept = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        if not isinstance(module, torch.jit.ScriptModule):
            aside = getattr(module, "_non_persistent_buffers_set", ())
            kept = {name: buffer for name, buffer in kept.items() if (memory if name in aside else persistent)}
            own.append((module, dict(vars(module)), dict(module._buffers) if memory and persistent else {**kept}))
        copies += [(buffer, buffer.detach().clone()) for buffer in kept.values()]

    def forget() -> None:
        for module, attributes, buffers in own:
            if memory:
                held = vars(module)
                for name in held.keys() - attributes.keys() - _OURS:
                    del held[name]
                held.update({n: v for n, v in attributes.items() if n not in _OURS and held.get(n, held) is not v})
                if persistent:
                    module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, values in copies:
                if not torch.equal(buffer, values):
                    buffer.copy_(values)

    try:
        yield forget
    finally:
        forget()


_DROPPING = frozenset(
    getattr(F, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
)


class _Still(TorchFunctionMode):
    """Every random draw replaced by the middle of its distribution, and nothing dropped."""

    def __init__(self, devices: list[int]):
        super().__init__()
        self.devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPPING or func is torch.dropout:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention and len(args) > 4:
            return func(*(*args[:4], 0.0, *args[5:]), **kwargs)
        if func is F.scaled_dot_product_attention:
            return func(*args, **{**kwargs, "dropout_p": 0.0})
        middle = _MIDDLES.get(func)
        if middle is None:
            return func(*args, **kwargs)
        with torch.random.fork_rng(devices=self.devices):
            return middle(func, args, kwargs)


def _like(value: float) -> Callable[..., Any]:
    return lambda func, args, kwargs: torch.full_like(func(*args, **kwargs), value)


def _chance(func: Any, args: Any, kwargs: Any) -> Any:
    chances = kwargs.get("p", args[1] if len(args) > 1 and not isinstance(args[1], torch.Generator) else args[0])
    drawn = func(*args, **kwargs)
    likely = (torch.as_tensor(chances, device=drawn.device) >= 0.5).to(drawn.dtype).expand_as(drawn)
    return drawn.copy_(likely)


_MIDDLES: dict[Any, Callable[..., Any]] = {
    torch.rand: _like(0.5),
    torch.rand_like: _like(0.5),
    torch.randn: _like(0.0),
    torch.randn_like: _like(0.0),
    torch.normal: lambda func, args, kwargs: func(*args, **kwargs).zero_(),
    torch.bernoulli: _chance,
    torch.Tensor.bernoulli: _chance,
    torch.Tensor.bernoulli_: _chance,
    torch.Tensor.normal_: lambda func, args, kwargs: args[0].fill_(kwargs.get("mean", args[1] if len(args) > 1 else 0)),
    torch.Tensor.uniform_: lambda func, args, kwargs: args[0].fill_(0.5),
    torch.Tensor.exponential_: lambda func, args, kwargs: args[0].fill_(1.0),
    F.gumbel_softmax: lambda func, args, kwargs: torch.softmax(args[0], kwargs.get("dim", -1)),
}


@contextmanager
def still(model: torch.nn.Module) -> Iterator[Callable[[], bool]]:
    """A forward pass without randomness; what it yields says whether some was drawn all the same."""
    changed: list[tuple[Any, str, float]] = []
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for attribute, value in list(vars(module).items()):
            is_rate = "drop" in attribute or (
                attribute == "p" and isinstance(module, torch.nn.modules.dropout._DropoutNd)
            )
            if is_rate and isinstance(value, float) and value:
                changed.append((module, attribute, value))
                setattr(module, attribute, 0.0)
    with ExitStack() as stack:
        for module, attribute, value in changed:
            stack.callback(setattr, module, attribute, value)
        before = random_state(model)
        stack.enter_context(_Still(devices(model)))
        yield lambda: not all(map(torch.equal, before, random_state(model)))


def random_state(model: torch.nn.Module) -> list[torch.Tensor]:
    """Torch's random states on the devices of a model."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(index) for index in devices(model))]


def randomness(model: torch.nn.Module) -> tuple[Any, ...]:
    """Everything that a pass may draw from, to be compared: torch's generators, Python's and, where it is loaded, numpy's."""
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else ("", b"", 0)
    return *(state.numpy().tobytes() for state in random_state(model)), random.getstate(), bytes(drawn[1]), drawn[2]
