"""Functions of torch's that are made of others: their own Python code runs, and what it reads is seen."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

#: A backward pass computes checkpointed pieces again.
COMPOSITE = frozenset({F.multi_head_attention_forward, torch.autograd.backward})


def opened(function: Any) -> Callable[..., Any] | None:
    """The code of a composite function, which asks no one else to run it; None for any other function.

    Its formula stays torch's own, whatever version: only its question whether somebody overrides it is answered with no.
    """
    # The set is asked first: a cache would keep other functions, and bound methods among them keep their tensors.
    return _opened(function) if function in COMPOSITE else None


@functools.cache
def _opened(function: Any) -> Callable[..., Any]:
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    inner = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    inner.__kwdefaults__ = function.__kwdefaults__
    return inner
