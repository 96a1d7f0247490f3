"""Learning-rate schedules of private optimizers advance once a release, however often a loop steps them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

#: How many releases each optimizer has applied while it was private, and which are private now.
_RELEASES: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_FOLLOWED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
#: At which of them each schedule last advanced.
_ADVANCED: weakref.WeakKeyDictionary[LRScheduler, int] = weakref.WeakKeyDictionary()

#: Schedules in the middle of a step.
_STEPPING: weakref.WeakSet[LRScheduler] = weakref.WeakSet()


def follow_releases(optimizer: torch.optim.Optimizer) -> None:
    """Let the schedules of an optimizer count its releases from here on.

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


def count_release(optimizer: torch.optim.Optimizer) -> None:
    """Note that the optimizer is about to apply another release."""
    _RELEASES[optimizer] = _RELEASES.get(optimizer, 0) + 1


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
        optimizer: Any = getattr(self, "optimizer", None)
        if isinstance(optimizer, torch.optim.Optimizer):
            # Releases from before it was made are none of its.
            _ADVANCED[self] = _RELEASES.get(optimizer, 0)

    wrapper.counts_releases = True  # type: ignore[attr-defined]
    return wrapper


def _once_a_release(step: Callable[..., None]) -> Any:
    @functools.wraps(step)
    def wrapper(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        optimizer: Any = getattr(self, "optimizer", None)
        # A schedule takes its first step as it is made, before there is anything to count; and one's step may call another's.
        if optimizer not in _FOLLOWED or getattr(self, "_step_count", 1) == 0 or self in _STEPPING:
            step(self, *args, **kwargs)
            return
        releases = _RELEASES.get(optimizer, 0)
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
