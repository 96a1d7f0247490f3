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


_METADATA = frozenset(
    "shape dtype device ndim layout is_cuda is_leaf requires_grad names is_sparse is_quantized is_meta size dim numel "
    "nelement stride is_floating_point is_complex is_contiguous element_size get_device storage_offset __len__ "
    "__repr__ __hash__ data_ptr ndimension retain_grad grad_fn grad _version untyped_storage is_inference "
    "is_cpu is_mps is_xpu output_nr itemsize nbytes".split()
)


def is_metadata(function: Any) -> bool:
    """Whether a torch function asks about a tensor without computing from its values."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        name = getattr(getattr(function, "__self__", None), "__name__", "")
    return name in _METADATA


def is_detach(function: Any) -> bool:
    """Whether a torch function cuts its result from the graph."""
    if function in (torch.Tensor.detach, torch.detach, torch.Tensor.detach_, torch.Tensor.numpy, torch.Tensor.item):
        return True
    return getattr(function, "__name__", "") == "__get__" and getattr(function.__self__, "__name__", "") == "data"
