"""Batches after the first: when they are looked at again, and what tells that the model is not the one that was looked at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

#: The shares of a run's time that checks of later batches may take: whole ones, and both kinds together.
SHARE, _BRIEF_SHARE = 0.005, 0.01
#: Seconds that brief checks may take in any run, however short.
_LEAST = 1.0
#: The hooks that torch calls for every module.
_EVERYWHERE = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
)
_PLAIN = frozenset({type(None), bool, int, float, str})
#: Attributes of these kinds are no settings: what batches leave behind, and what torch keeps for itself.
_PASSED = _PLAIN | {dict, list, tuple, set, torch.Tensor, torch.nn.Parameter}
_Screen = tuple[list[Any], list[Any], list[int]]


class Structure:
    """Notices hooks hung on modules, modules exchanged, parameters tied, and settings switched."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._settled = False
        self._modules: list[tuple[torch.nn.Module, _Screen, tuple[Any, ...]]] = []
        self._rest: tuple[Any, ...] = ()

    def changed(self) -> bool:
        """Whether anything did since this was asked last; False the first time.

        A module none of whose attributes is another object than before is not looked at closer.
        """
        rest = (*(key for hooks in _EVERYWHERE for key in hooks), *_settings(getattr(self._model, "config", None)))
        found = not self._settled or rest != self._rest
        for index, (module, screen, known) in enumerate(self._modules):
            now = _screen(module)
            if now != screen:
                latest = _described(module)
                found |= latest != known
                self._modules[index] = (module, now, latest)
        if found:
            self._modules = [(m, _screen(m), _described(m)) for m in self._model.modules()]
            self._rest = rest
        found, self._settled = found and self._settled, True
        return found


def _screen(module: torch.nn.Module) -> _Screen:
    values = [*vars(module).values()]
    return (
        [v for v in values if type(v) in _PLAIN],
        [*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks],
        [
            *(id(v) for v in values if type(v) not in _PASSED),
            *map(id, module._parameters.values()),
            *map(id, module._modules.values()),
        ],
    )


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
    """When later batches are checked: briefly at growing intervals, and as the first was; within shares of the run's time.

    Args:
        batches: micro-batches that the run will have, so that its first ones may be checked on the later ones' account, and
            brief checks are spread over all of them; 0 for a run of unknown length.
    """

    def __init__(self, batches: int) -> None:
        self._planned = batches
        self._began: float | None = None
        self._spent = self._brief = self._longest = self._entered = 0.0
        self._batches, self._next = 1, 2

    def due(self) -> bool:
        """Whether this batch, counted now, ends an interval (the 2nd, 3rd, 4th, 6th ... or rarer) and a check is affordable."""
        self._batches += 1
        if self._began is None or self._batches < self._next:
            return False
        each = (time.perf_counter() - self._began - self._spent) / (self._batches - 1)
        whole = max(self._planned, self._batches)
        left = max(_LEAST, _BRIEF_SHARE * each * whole) - self._spent
        checks = left / max(self._brief, each / 3)
        if checks < 1:
            return False
        grow = max(1.5, (whole / self._batches) ** (1 / checks))
        self._next = self._batches + max(1, int(self._batches * (grow - 1)))
        return True

    def affordable(self) -> bool:
        """Whether one more whole check, at what the dearest took, stays within the share."""
        return self._began is not None and self._spent + self._longest < SHARE * (time.perf_counter() - self._began)

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter()
        took = now - self._entered
        self._longest = max(self._longest, took)
        if self._began is None:
            self._began = now
        else:
            self._spent += took
            self._brief = took
