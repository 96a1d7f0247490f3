"""Learning-rate schedules of private optimizers advance once a release, however often a loop steps them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

#: How many releases each private optimizer has applied.
_RELEASES: weakref.WeakKeyDictionary[torch.optim.Optimizer, Callable[[], int]] = weakref.WeakKeyDictionary()
#: At which of them each schedule last advanced.
_ADVANCED: weakref.WeakKeyDictionary[LRScheduler, int] = weakref.WeakKeyDictionary()

#: Schedules in the middle of a step.
_STEPPING: weakref.WeakSet[LRScheduler] = weakref.WeakSet()


def follow_releases(optimizer: torch.optim.Optimizer, releases: Callable[[], int]) -> None:
    """Let the schedules of an optimizer count its releases from here on.

    A loop over micro-batches steps its schedule after each of them, as it steps the optimizer. The optimizer then does nothing
    but for the last micro-batch of a logical batch; a schedule that advanced each time would be at its end, and the learning
    rate at 0, after a fraction of the releases that were paid for. torch gives a schedule's optimizer no say in this, so
    `step` of torch's schedules is wrapped; those of other optimizers are not touched.
    """
    for schedule in _classes(LRScheduler):
        if "step" in vars(schedule) and not hasattr(schedule.step, "once_a_release"):
            schedule.step = _once_a_release(schedule.step)  # type: ignore[method-assign]
    _RELEASES[optimizer] = releases


def forget_releases(optimizer: torch.optim.Optimizer) -> None:
    """Leave the schedules of an optimizer to the loop again."""
    _RELEASES.pop(optimizer, None)


def _classes(kind: type[LRScheduler]) -> Iterator[type[LRScheduler]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _classes(narrower)


def _once_a_release(step: Callable[..., None]) -> Any:
    @functools.wraps(step)
    def wrapper(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        releases = _RELEASES.get(getattr(self, "optimizer", None))  # type: ignore[arg-type]
        # A schedule takes its first step as it is made, before there is anything to count; and one's step may call another's.
        if releases is None or getattr(self, "_step_count", 1) == 0 or self in _STEPPING:
            step(self, *args, **kwargs)
            return
        if releases() <= _ADVANCED.get(self, 0):
            return
        _ADVANCED[self] = releases()
        _STEPPING.add(self)
        try:
            step(self, *args, **kwargs)
        finally:
            _STEPPING.discard(self)

    wrapper.once_a_release = True  # type: ignore[attr-defined]
    return wrapper
