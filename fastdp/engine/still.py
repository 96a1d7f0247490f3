"""Passes that leave no mark on a model or a random state, and passes without randomness."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fastdp.engine.batches import tensors
from fastdp.engine.errors import SelfCheckError
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


@dataclass
class Chance:
    """What a pass without randomness has in its place.

    Args:
        at: the quantile of its distribution that stands for each draw; numbers of Python's and of numpy's own generators are
            near it unless it is the middle, and then what they are.

    Attributes:
        laws: probabilities, means and deviations of what would have been drawn, which a quantile may not tell.
        drawn: whether anything would have been.
    """

    at: float = 0.5
    laws: list[torch.Tensor] = field(default_factory=list)
    drawn: bool = False

    @property
    def normal(self) -> float:
        """The quantile of the standard normal distribution."""
        return NormalDist().inv_cdf(self.at)


class _Still(TorchFunctionMode):
    """Every random draw replaced by a quantile of its distribution, and nothing dropped."""

    def __init__(self, devices: list[int], chance: Chance):
        super().__init__()
        self.devices, self.chance = devices, chance

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None and generator is not torch.default_generator and not _is_a_gpus_own(generator):
            raise SelfCheckError(
                "the model draws by a torch.Generator of its own: who knows its seed knows what each place of a batch gets, and "
                "a record more moves all behind it; leave `generator` out, so that torch's own is asked"
            )
        if func in _DROPPING or func is torch.dropout:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention and len(args) > 4:
            return func(*(*args[:4], 0.0, *args[5:]), **kwargs)
        if func is F.scaled_dot_product_attention:
            return func(*args, **{**kwargs, "dropout_p": 0.0})
        quantile = _QUANTILES.get(func)
        if quantile is None:
            return func(*args, **kwargs)
        self.chance.drawn = True
        if func in _LAWFUL:
            given = args[1:] if func in _IN_PLACE else args
            self.chance.laws += [t.detach().clone() for t in tensors((given, kwargs)) if t.is_floating_point()]
        with torch.random.fork_rng(devices=self.devices):
            return quantile(self.chance, func, args, kwargs)


def _is_a_gpus_own(generator: torch.Generator) -> bool:
    return torch.cuda.is_initialized() and any(generator is own for own in torch.cuda.default_generators)


def _like(value: Callable[[Chance], float]) -> Callable[..., Any]:
    return lambda chance, func, args, kwargs: torch.full_like(func(*args, **kwargs), value(chance))


def _bernoulli(chance: Chance, func: Any, args: Any, kwargs: Any) -> Any:
    chances = kwargs.get("p", args[1] if len(args) > 1 and not isinstance(args[1], torch.Generator) else args[0])
    drawn = func(*args, **kwargs)
    likely = (torch.as_tensor(chances, device=drawn.device) >= 1 - chance.at).to(drawn.dtype).expand_as(drawn)
    return drawn.copy_(likely)


def _fill(value: Callable[..., Any], **default: float) -> Callable[..., Any]:
    """For a draw into a tensor, whose parameters come by these names, or in this order."""

    def run(chance: Chance, func: Any, args: Any, kwargs: Any) -> Any:
        given = [
            kwargs.get(name, args[i] if i < len(args) else own) for i, (name, own) in enumerate(default.items(), 1)
        ]
        return args[0].fill_(value(chance, *given))

    return run


def _normal(chance: Chance, func: Any, args: Any, kwargs: Any) -> Any:
    mean, std = (kwargs.get(name, args[i] if i < len(args) else own) for i, (name, own) in enumerate(_NORMAL.items()))
    return func(*args, **kwargs).copy_(mean + chance.normal * std)


_NORMAL = {"mean": 0.0, "std": 1.0}
_QUANTILES: dict[Any, Callable[..., Any]] = {
    torch.rand: _like(lambda chance: chance.at),
    torch.rand_like: _like(lambda chance: chance.at),
    torch.randn: _like(lambda chance: chance.normal),
    torch.randn_like: _like(lambda chance: chance.normal),
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.Tensor.bernoulli_: _bernoulli,
    torch.Tensor.normal_: _fill(lambda chance, mean, std: mean + chance.normal * std, **_NORMAL),
    torch.Tensor.uniform_: _fill(lambda chance, low, high: low + chance.at * (high - low), **{"from": 0.0, "to": 1.0}),
    torch.Tensor.exponential_: _fill(lambda chance, rate: -math.log1p(-chance.at) / rate, lambd=1.0),
    F.gumbel_softmax: lambda chance, func, args, kwargs: torch.softmax(args[0], kwargs.get("dim", -1)),
}
#: Draws whose probabilities, means or deviations are tensors.
_IN_PLACE = frozenset({torch.Tensor.bernoulli_})
_LAWFUL = frozenset({torch.bernoulli, torch.Tensor.bernoulli, torch.normal}) | _IN_PLACE


@contextmanager
def still(model: torch.nn.Module, chance: Chance | None = None) -> Iterator[Callable[[], bool]]:
    """A forward pass without randomness; what it yields says whether some was drawn all the same."""
    chance = Chance() if chance is None else chance
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
        if chance.at != 0.5:
            _put_near(chance.at)
        hosts = _host_states()
        stack.callback(lambda: setattr(chance, "drawn", chance.drawn or hosts != _host_states()))
        stack.enter_context(_Still(devices(model), chance))
        yield lambda: not all(map(torch.equal, before, random_state(model)))


def random_state(model: torch.nn.Module) -> list[torch.Tensor]:
    """Torch's random states on the devices of a model."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(index) for index in devices(model))]


def randomness(model: torch.nn.Module) -> tuple[Any, ...]:
    """Everything that a pass may draw from, to be compared: torch's generators, Python's and, where it is loaded, numpy's."""
    return *(state.numpy().tobytes() for state in random_state(model)), *_host_states()


def _host_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else ("", b"", 0)
    return random.getstate(), bytes(drawn[1]), drawn[2]


def _put_near(quantile: float) -> None:
    """Have Python's generator, and numpy's, give numbers near this share of 1 for a while: of 624 words each says so."""
    word = _untempered(int(quantile * 2**32))
    random.setstate((3, (*[word] * 624, 0), None))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(("MT19937", numpy.full(624, word, numpy.uint32), 0))


def _untempered(word: int) -> int:
    """The word of a Mersenne Twister's state that it hands out as this one."""
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    found = word
    for _ in range(4):
        found = word ^ ((found << 7) & 0x9D2C5680)
    word = found & 0xFFFFFFFF
    return word ^ (word >> 11) ^ (word >> 22)
