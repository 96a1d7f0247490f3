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

    torch's functions find no gradient then, and do nothing or fail. They say nothing of who calls them, so those in
    `torch.nn.utils` are wrapped, as schedules are; with gradients they do what they did.
    """
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        own = getattr(torch.nn.utils, name)
        if not hasattr(own, "watches_models"):
            setattr(torch.nn.utils, name, _watching(own))
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
                    stacklevel=2,
                )
            # The norm of no gradients: torch's other function does not take an empty list.
            return torch.tensor(0.0) if clip.__name__ == "clip_grad_norm_" else None
        return clip(parameters, *args, **kwargs)

    wrapper.watches_models = True  # type: ignore[attr-defined]
    return wrapper
