"""Random generators that a data set or a collator holds: found, held in a check, and drawn from the operating system to train.

With a seed that is known, what an example is given would follow from how many others were read before it.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import random
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch

#: How far they are looked for: a data set in a subset in a data set, and its generator.
_DEPTH = 4
#: The first numbers that any generator draws between 0 and 1 are below .1 under the one seed, and above .9 under the other:
#: what happens with some chance happens in a check.
SEEDS = (1630, 2152)
_ASKED = ("__call__", "__getitem__", "__getitems__")


def own_generators(*owners: Any) -> list[Any]:
    """The generators that objects hold as attributes, or that their functions name; torch's, Python's and numpy's."""
    found, seen, due = [], set(), [(owner, 0) for owner in owners]
    while due:
        owner, depth = due.pop()
        if id(owner) in seen or isinstance(owner, (ModuleType, torch.Tensor, torch.nn.Module)):
            continue
        seen.add(id(owner))
        if isinstance(owner, (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)):
            found.append(owner)
        elif depth < _DEPTH:
            due += [(part, depth + 1) for part in _parts(owner)]
    return found


def _parts(owner: Any) -> Iterable[Any]:
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
    if isinstance(owner, type):
        return ()
    functions = (vars(kind).get(name) for kind in type(owner).__mro__ for name in _ASKED)
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
        self._held = [(generator, _state(generator)) for generator in own_generators(*owners)]
        self._seed: int | None = None
        self._begun: list[bytes] = []
        self.drawn = False

    def at(self, seed: int) -> HeldGenerators:
        """The same, which begin with a seed."""
        self._seed = seed
        return self

    def __enter__(self) -> None:
        for generator, state in self._held:
            if self._seed is None:
                _set_state(generator, state)
            else:
                _set_seed(generator, self._seed)
        self._begun = self._states()

    def __exit__(self, *_: object) -> None:
        self.drawn |= self._states() != self._begun
        for generator, state in self._held:
            _set_state(generator, state)

    def _states(self) -> list[bytes]:
        return [pickle.dumps(_state(generator)) for generator, _ in self._held]


def seed_own_generators(*owners: Any) -> None:
    """Seed them from the operating system."""
    for generator in own_generators(*owners):
        _set_seed(generator, int.from_bytes(os.urandom(32), "little"))


def _set_seed(generator: Any, seed: Any) -> None:
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
