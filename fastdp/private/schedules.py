"""Learning-rate schedules of private optimizers advance once a release, however often a loop steps them, and see no figure."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


class ReleaseCount:
    """How many releases an optimizer has applied, or is about to, while it was private."""

    count = 0


#: Those of each optimizer, and which optimizers are private now.
_RELEASES: weakref.WeakKeyDictionary[torch.optim.Optimizer, ReleaseCount] = weakref.WeakKeyDictionary()
_FOLLOWED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
#: At which of them each schedule last advanced.
_ADVANCED: weakref.WeakKeyDictionary[LRScheduler, int] = weakref.WeakKeyDictionary()

#: Schedules in the middle of a step.
_STEPPING: weakref.WeakSet[LRScheduler] = weakref.WeakSet()


def follow_releases(optimizer: torch.optim.Optimizer) -> ReleaseCount:
    """Let the schedules of an optimizer go by its releases from here on; returns what counts them.

    A loop over micro-batches steps its schedule after each of them, as it steps the optimizer. The optimizer then does nothing
    but for the last micro-batch of a logical batch; a schedule that advanced each time would be at its end, and the learning
    rate at 0, after a fraction of the releases that were paid for. torch gives a schedule's optimizer no say in this, so
    `step` of torch's schedules is wrapped; those of other optimizers are not touched.
    """
    for schedule in _classes(LRScheduler):
        for name, wrap in (("__init__", _from_now_on), ("step", _once_a_release)):
            own = vars(schedule).get(name)
            if own is not None and not hasattr(own, "counts_releases"):
                setattr(schedule, name, wrap(own))
    _FOLLOWED.add(optimizer)
    return _RELEASES.setdefault(optimizer, ReleaseCount())


def forget_releases(optimizer: torch.optim.Optimizer) -> None:
    """Leave the schedules of an optimizer to the loop again."""
    _FOLLOWED.discard(optimizer)


def _classes(kind: type[LRScheduler]) -> Iterator[type[LRScheduler]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _classes(narrower)


def _from_now_on(begin: Callable[..., None]) -> Any:
    @functools.wraps(begin)
    def wrapper(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        optimizer = _innermost(self)
        if isinstance(optimizer, torch.optim.Optimizer):
            if optimizer in _FOLLOWED:
                require_public_schedule(self)
            # Releases from before it was made are none of its.
            _ADVANCED[self] = _RELEASES[optimizer].count if optimizer in _RELEASES else 0

    wrapper.counts_releases = True  # type: ignore[attr-defined]
    return wrapper


def _innermost(schedule: LRScheduler) -> Any:
    """A schedule's optimizer, without what a launcher has wrapped around it; the chain that steps it, where there is one."""
    optimizer: Any = getattr(schedule, "optimizer", None)
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return getattr(optimizer, "chain", optimizer)


def require_public_schedule(schedule: Any) -> None:
    """Raise ValueError for a schedule that reads a figure: updates are as long as their learning rate, and tell it to anyone.

    It says so by what its ``step`` takes besides the number of an epoch.
    """
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    taken = (
        p for name, p in inspect.signature(type(schedule).step).parameters.items() if name not in ("self", "epoch")
    )
    if any(p.kind not in kinds for p in taken):
        raise ValueError(
            f"{type(schedule).__name__} sets the learning rate by a figure, which no noise covers: use a schedule of steps, or "
            "set lr in optimizer.param_groups by public figures"
        )


def refuse_private_schedules(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if an optimizer has a schedule already that reads a figure; torch keeps no list of them."""
    for schedule in gc.get_objects():
        if issubclass(type(schedule), LRScheduler) and _innermost(schedule) is optimizer:
            require_public_schedule(schedule)


def _once_a_release(step: Callable[..., None]) -> Any:
    @functools.wraps(step)
    def wrapper(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        optimizer = _innermost(self)
        if optimizer in _FOLLOWED:
            require_public_schedule(self)
        # A schedule takes its first step as it is made, before there is anything to count; and one's step may call another's.
        if optimizer not in _FOLLOWED or getattr(self, "_step_count", 1) == 0 or self in _STEPPING:
            step(self, *args, **kwargs)
            return
        releases = _RELEASES[optimizer].count
        if releases <= _ADVANCED.get(self, 0):
            return
        _ADVANCED[self] = releases
        _STEPPING.add(self)
        try:
            step(self, *args, **kwargs)
        finally:
            _STEPPING.discard(self)

    wrapper.counts_releases = True  # type: ignore[attr-defined]
    return wrapper
