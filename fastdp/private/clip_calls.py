"""Calls of `torch.nn.utils.clip_grad_norm_` in private loops, which have no gradients before `step()`."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

#: The models of private runs, and whether a warning was given.
_WATCHED: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def watch_clipping(model: torch.nn.Module) -> None:
    """Warn once if gradients of a model are clipped before its optimizer's step has made them.

    torch's functions find no gradient then, and do nothing or fail. They say nothing of who calls them, so they are wrapped, as
    schedules are; with gradients they do what they did. Scripts import them by name, so it happens within torch's own
    decorator, whose closure holds what it decorates.
    """
    for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        for cell in getattr(clip, "__closure__", None) or ():
            if cell.cell_contents is getattr(clip, "__wrapped__", cell):
                cell.cell_contents = _watching(cell.cell_contents)
    _WATCHED[model] = False


def leave_clipping(model: torch.nn.Module) -> None:
    """Say nothing of a model any more."""
    _WATCHED.pop(model, None)


def _watching(clip: Callable[..., Any]) -> Any:
    @functools.wraps(clip)
    def wrapper(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        held = {*map(id, parameters)} if all(parameter.grad is None for parameter in parameters) else set()
        for model, warned in [*_WATCHED.items()] if held else ():
            if held.isdisjoint(map(id, model.parameters())):
                continue
            if not warned:
                _WATCHED[model] = True
                warnings.warn(
                    f"{clip.__name__} has no effect: gradients are None before step(), and per-example clipping "
                    "(max_grad_norm) replaces it. Remove the call.",
                    stacklevel=3,
                )
            # The norm of no gradients: torch's other function does not take an empty list.
            return torch.tensor(0.0) if clip.__name__ == "clip_grad_norm_" else None
        return clip(parameters, *args, **kwargs)

    return wrapper
