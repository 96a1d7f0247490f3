"""Random generators that a data set, a collator or a model holds: found, held in a check, and seeded from the operating system.

With a seed that is known, what an example is given would follow from how many others were read before it.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch

#: How far they are looked for: a subset, its data set, transforms, their list, one of them, and its generator.
_DEPTH = 5
#: The most entries of a list or mapping that are looked at: transforms, and not examples.
_ENTRIES = 32
#: How many functions of a training loop are looked at, and how far their variables: a function, an object, its generator.
_FRAMES, _REACH = 4, 3
#: Types of values that hold none.
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
#: The first numbers that any generator draws between 0 and 1 are below .1 under the one seed, and above .9 under the other:
#: what happens with some chance happens in a check.
SEEDS = (1630, 2152)
#: The methods by which a loader reads data sets and calls transforms: they may name a generator.
_READING_METHODS = ("__call__", "__getitem__", "__getitems__")
_KINDS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)


def own_generators(*owners: Any) -> list[Any]:
    """The generators that objects hold as attributes, or that their functions name; torch's, Python's and numpy's."""
    return _reachable(owners, _KINDS, _DEPTH)


def _reachable(owners: Iterable[Any], kinds: Any, depth: int) -> list[Any]:
    found: list[Any] = []
    seen: set[int] = set()
    # The nearest first: what is met far away once is then not left unexpanded where it is near.
    due = deque((owner, depth) for owner in owners if type(owner) not in _PLAIN)
    while due:
        owner, left = due.popleft()
        if id(owner) in seen or isinstance(owner, (ModuleType, random.SystemRandom)):
            continue
        seen.add(id(owner))
        if isinstance(owner, kinds):
            found.append(owner)
        elif left and not isinstance(owner, torch.Tensor):
            due += [(part, left - 1) for part in _parts(owner) if type(part) not in _PLAIN]
    return found


def callers_generators() -> list[Any]:
    """The generators that a training loop can reach: by the variables of the functions that ask for a batch."""
    return _reachable(_variables(), _KINDS, _REACH)


def callers_tensors() -> list[torch.Tensor]:
    """The tensors that a training loop can reach."""
    return _reachable(_variables(), torch.Tensor, _REACH)


def _variables() -> list[Any]:
    held: list[Any] = []
    frame, left = inspect.currentframe(), _FRAMES
    while frame is not None and left:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("fastdp", "torch"):
            left -= 1
            held += [frame.f_globals.get(name) for name in frame.f_code.co_names]
            own = frame.f_locals
            held += own.values()
            # Before Python 3.13 this is a copy that the frame keeps, and a batch with it. Three references are the frame's, this
            # one and the question's own: nobody else holds it.
            if type(own) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(own) == 3:
                own.clear()
        frame = frame.f_back
    return held


def _parts(owner: Any) -> Iterable[Any]:
    if isinstance(owner, torch.nn.Module):
        # Torch's own mappings hold hooks and tensors, and the engine replaces forwards.
        own = {k: v for k, v in vars(owner).items() if k != "forward" and not (k[0] == "_" and isinstance(v, dict))}
        return *own.values(), *owner.modules()
    if isinstance(owner, functools.partial):
        return owner.func, *owner.args, *owner.keywords.values()
    if hasattr(owner, "__self__"):
        return owner.__self__, getattr(owner, "__func__", None)
    if isinstance(owner, FunctionType):
        try:
            known = inspect.getclosurevars(owner)
        except ValueError:
            # A variable of an outer function that has no value yet.
            return ()
        return *known.nonlocals.values(), *known.globals.values()
    if isinstance(owner, (list, tuple, dict)):
        entries = owner.values() if isinstance(owner, dict) else owner
        return entries if len(owner) <= _ENTRIES else ()
    if isinstance(owner, type):
        return ()
    functions = (vars(kind).get(name) for kind in type(owner).__mro__ for name in _READING_METHODS)
    return *getattr(owner, "__dict__", {}).values(), *(f for f in functions if isinstance(f, FunctionType))


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


class HeldGenerators:
    """Generators as they are now: what runs within begins with these states, or with a seed, and leaves these.

    Attributes:
        drawn: whether anything was drawn from them within.
    """

    def __init__(self, *owners: Any) -> None:
        self._generator_states = [(generator, _state(generator)) for generator in own_generators(*owners)]
        self._seed: int | None = None
        self._begun: list[bytes] = []
        self.drawn = False

    def at(self, seed: int) -> HeldGenerators:
        """The same, which begin with a seed."""
        self._seed = seed
        return self

    def __enter__(self) -> None:
        for generator, state in self._generator_states:
            if self._seed is None:
                _set_state(generator, state)
            else:
                set_seed(generator, self._seed)
        self._begun = self.states()

    def __exit__(self, *_: object) -> None:
        self.drawn |= self.moved()
        for generator, state in self._generator_states:
            _set_state(generator, state)

    def moved(self) -> bool:
        """Whether anything was drawn from them since they began."""
        return self.states() != self._begun

    def states(self) -> list[bytes]:
        """Fingerprints of their states at this moment."""
        found = (_state(generator) for generator, _ in self._generator_states)
        # Torch pickles one state in several ways.
        return [s.numpy().tobytes() if isinstance(s, torch.Tensor) else pickle.dumps(s) for s in found]


def set_seed(generator: Any, seed: Any) -> None:
    """Seed a generator of torch's, Python's or numpy's."""
    if isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, numpy.random.Generator):
        fresh = type(generator.bit_generator)(seed)  # type: ignore[call-arg]
        generator.bit_generator.state = fresh.state
    elif isinstance(generator, numpy.random.RandomState):
        words = [seed >> 32 * word & 0xFFFFFFFF for word in range(8)] if seed >> 32 else seed
        generator.seed(words)
    else:
        generator.manual_seed(seed & (1 << 63) - 1)
