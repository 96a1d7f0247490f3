"""Another device than the processor: tensors that are not on it, hold their numbers in main memory, and mix with none of it.

Within `elsewhere` tensors of the device ``meta``, which torch knows everywhere, have values. Operations are computed by the
processor; one that mixes devices raises as on a GPU, with the exceptions that torch makes too (numbers, indices, copies).
Every op of `fastdp.ops` that ran there is counted.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from fastdp.ops.table import OPS

DEVICE = torch.device("meta")
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default)


class There(torch.Tensor):
    """A tensor of the device: the numbers are in ``held``."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        self.held = held
        return self

    def __repr__(self, **_):
        return f"There({self.held})"

    def tolist(self):
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("a tensor of the device was used outside `elsewhere`")


class _Device(TorchDispatchMode):
    def __init__(self, implementation):
        super().__init__()
        self.implementation = implementation
        self.ran = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)]
        there = [a for a in given if isinstance(a, There)]
        wanted = kwargs.get("device")
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        if there and len(there) < len(given) and func not in _COPIES:
            self._refuse_mixing(func, args, given)
        args, kwargs = tree_map(lambda a: a.held if isinstance(a, There) else a, (args, kwargs))
        name = func._schema.name.removeprefix("fastdp::")
        if func.namespace == "fastdp" and there:
            self.ran[name] += 1
            result = OPS[name].on(self.implementation, *args)
        else:
            result = func(*args, **kwargs)
        on_device = torch.device(wanted) == DEVICE if wanted is not None else bool(there)
        if func is torch.ops.aten.copy_.default:
            return given[0]
        if func._schema.is_mutable and given:
            return given[0]
        return tree_map(lambda r: There(r) if on_device and isinstance(r, torch.Tensor) else r, result)

    def _refuse_mixing(self, func, args, given):
        if func.namespace == "fastdp":
            # A position is words that an op reads on the host.
            given = [a for a in given if isinstance(a, There) or a.dtype != torch.int32]
        elif func in _INDEXED:
            given = [args[0], *args[2:3]]
        mixed = {isinstance(a, There) for a in given if a.dim() or isinstance(a, There)}
        if len(mixed) > 1:
            raise RuntimeError(f"{func} mixes the device and main memory: {[type(a).__name__ for a in given]}")


class _Numbers(TorchFunctionMode):
    """Tensors made of numbers on the device: torch would drop their values before a dispatch mode sees them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            return func(*args, **{**kwargs, "device": None}).to(kwargs["device"])
        return func(*args, **kwargs)


@contextmanager
def elsewhere(implementation="cpu"):
    """Within, ``meta`` is a device whose ops are those of ``implementation``; yields how often each of ours ran there."""
    with _Device(implementation) as device, _Numbers():
        yield device.ran
