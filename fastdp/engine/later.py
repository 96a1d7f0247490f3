"""Batches after the first: when they are looked at again, and what tells that the model is not the one that was looked at."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: The shares of a run's time that checks of later batches may take: whole ones, and both kinds together. Looking whether
#: anything moved at all takes the rest of a hundredth.
SHARE, _BRIEF_SHARE = 0.005, 0.0075
#: Seconds that brief checks may take in any run, however short.
_LEAST = 0.25
#: How the batches between two brief checks grow at a run's beginning, where changes are likeliest.
_GROWTH = 0.5
#: The hooks that torch calls for every module.
_EVERYWHERE = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
)


class Structure:
    """Notices hooks hung on modules, modules exchanged, parameters tied, and settings switched."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._settled = False
        self._modules: list[tuple[torch.nn.Module, tuple[Any, ...], tuple[Any, ...]]] = []
        self._rest: tuple[Any, ...] = ()

    def changed(self) -> bool:
        """Whether anything did since this was asked last; False the first time.

        A module none of whose attributes is another object than before is not looked at closer.
        """
        rest = (*(key for hooks in _EVERYWHERE for key in hooks), *_settings(getattr(self._model, "config", None)))
        found = not self._settled or rest != self._rest
        for index, (module, held, known) in enumerate(self._modules):
            now = _held(module)
            if len(now) != len(held) or not all(map(operator.is_, now, held)):
                latest = _described(module)
                found |= latest != known
                self._modules[index] = (module, _kept(now), latest)
        if found:
            self._modules = [(m, _kept(_held(m)), _described(m)) for m in self._model.modules()]
            self._rest = rest
        found, self._settled = found and self._settled, True
        return found


def _held(module: torch.nn.Module) -> tuple[Any, ...]:
    """Every object that a module holds."""
    return (
        *vars(module).values(),
        *module._forward_hooks,
        *module._forward_pre_hooks,
        *module._backward_hooks,
        *module._parameters.values(),
        *module._modules.values(),
    )


def _kept(held: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same, to be compared later; nothing, which equals nothing, where that would keep a batch's tensors alive."""
    return () if any(type(value) is torch.Tensor for value in held) else held


def _described(module: torch.nn.Module) -> tuple[Any, ...]:
    return (
        *module._forward_hooks,
        *module._forward_pre_hooks,
        *module._backward_hooks,
        *map(id, module._parameters.values()),
        *map(id, module._modules.values()),
        *_settings(module),
    )


def _settings(owner: object) -> Iterator[Any]:
    """What attributes of an object switch: texts, whether a number is zero, and which function stands in a name's place.

    The sizes of numbers are left out, as counters and annealed ones change with every batch.
    """
    for name, value in getattr(owner, "__dict__", {}).items():
        if value is None or isinstance(value, (bool, int, float)):
            yield name, value is None, bool(value)
        elif isinstance(value, str):
            yield name, value
        elif callable(value):
            yield name, id(value)


class Schedule:
    """When later batches are checked: briefly, and as the first was; within shares of the run's time.

    Intervals of brief checks grow by half of the batches so far, faster where the time allows for few checks, and are equal
    once those that it allows for reach to the end. None is longer than an even share of the batches that are left. Besides,
    a batch of more rows than any before it, or of fewer, is always checked: a model may branch on their number.

    Args:
        batches: micro-batches that the run will have, so that its first ones may be checked on the later ones' account, and
            brief checks are spread over all of them; 0 for a run of unknown length.
        device: that of the model. A processor's own time is counted, so that what else the machine does takes no check away.
    """

    def __init__(self, batches: int, device: torch.device) -> None:
        self._planned = batches
        self._clock = time.process_time if device.type == "cpu" else time.perf_counter
        self._began: float | None = None
        self._spent = self._briefly = self._brief = self._longest = 0.0
        self._batches, self._next = 1, 2
        self._fewest = self._most = 0

    def begin(self, rows: int) -> None:
        """The first batch was checked, and has so many rows."""
        self._fewest = self._most = rows

    def due(self, rows: int) -> bool:
        """Whether this batch, counted now, ends an interval and time allows a check, or has a number of rows that needs one."""
        self._batches += 1
        if self._began is None:
            return False
        if not self._fewest <= rows <= self._most:
            self._fewest, self._most = min(self._fewest, rows), max(self._most, rows)
            return True
        if self._batches < self._next:
            return False
        each = (self._clock() - self._began - self._spent) / (self._batches - 1)
        whole = max(self._planned, self._batches)
        left = max(_LEAST, _BRIEF_SHARE * each * whole) - self._briefly
        checks = left / max(self._brief, each / 3)
        if checks < 1:
            return False
        # So few that even intervals would leave the first ones for too long a time grow all along.
        growing = self._batches * ((whole / self._batches) ** (1 / checks) - 1)
        even = min(_GROWTH * self._batches, (whole - self._batches) / checks)
        self._next = self._batches + max(1, int(growing), int(even))
        return True

    def affordable(self) -> bool:
        """Whether one more whole check, at what the dearest took, stays within the share."""
        return self._began is not None and self._spent + self._longest < SHARE * (self._clock() - self._began)

    @contextmanager
    def check(self, *, brief: bool = False) -> Iterator[None]:
        """Count the time of a check meanwhile, the first of which is free; brief ones have an account of their own."""
        entered = self._clock()
        try:
            yield
        finally:
            now = self._clock()
            took = now - entered
            if self._began is None:
                self._began, self._longest = now, took
            elif brief:
                self._brief, self._briefly, self._spent = took, self._briefly + took, self._spent + took
            else:
                self._longest, self._spent = max(self._longest, took), self._spent + took
