"""Functions of torch's that are made of others: their own Python code runs, and what it reads is seen."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def _reopened(function: Any) -> Callable[..., Any]:
    """The code of a function, to which nobody overrides torch's: its formula stays torch's own, whatever version."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    inner = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    inner.__kwdefaults__ = function.__kwdefaults__
    return inner


#: The code of each, by the function. A backward pass computes checkpointed pieces again.
COMPOSITE = {function: _reopened(function) for function in (F.multi_head_attention_forward, torch.autograd.backward)}
#: The code of a composite function; None for any other.
opened = COMPOSITE.get
