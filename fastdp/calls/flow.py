"""What descends from the data in a forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastdp.calls.batches import RowNumbers, tensors
from fastdp.calls.marks import Marks
from fastdp.calls.named import is_metadata


class DataFlow(TorchFunctionMode):
    """Follows what is computed from the data through one forward pass.

    Args:
        inputs: the tensors that carry rows.
    """

    def __init__(self, inputs: Iterable[torch.Tensor]):
        super().__init__()
        inputs = list(inputs)
        self.data: Marks[None] = Marks((t, None) for t in inputs)
        #: Whether some inputs are lists: what is made of no tensor may be made of them.
        self.listed = any(isinstance(t, RowNumbers) for t in inputs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not is_metadata(func):
            self.follow(func, args, kwargs, tensors((args, kwargs)), out)
        return out

    def follow(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], out: Any) -> bool:
        """Look at what one operation returned. True if it was given data."""
        found = any(map(self.data.__contains__, given)) or (self.listed and not given)
        # What is written into becomes data too.
        for result in (given[:1] if func is torch.Tensor.__setitem__ else tensors(out)) if found else ():
            self.data[result] = None
        return found
