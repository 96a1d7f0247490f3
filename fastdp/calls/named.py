"""Torch's functions and methods by their names, whichever of them the installed version has."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def functions(names: str, *owners: Any) -> frozenset[Any]:
    """The functions of these names that the owners have; by default torch, its tensors and `torch.nn.functional`."""
    owners = owners or (torch, torch.Tensor, F)
    return frozenset(f for name in names.split() for owner in owners if (f := getattr(owner, name, None)) is not None)


def operation(func: Any) -> str:
    """The name under which what a trace finds of an operation is recorded."""
    return getattr(func, "__name__", str(func))


def is_in_place(func: Any) -> bool:
    """Whether an operation writes into its first argument."""
    name = operation(func)
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
