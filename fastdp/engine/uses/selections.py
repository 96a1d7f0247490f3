"""Whose the tokens are that a forward pass selects by the data's values: followed from the selection to its loss."""

from __future__ import annotations

import os
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastdp.calls.batches import tensors
from fastdp.calls.marks import Marks
from fastdp.calls.named import functions
from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.uses.rows import reduced

_FINDING = functions("nonzero argwhere") | {torch.where}
_PICKING = functions("gather take_along_dim index_select")
_MASKING = functions("masked_select")
_GETS = torch.Tensor.__getitem__
#: These keep the entries of a first axis whose length stays, in their order.
_KEEPING = functions(
    "view reshape flatten unsqueeze squeeze expand expand_as float double half bfloat16 to type_as long contiguous clone detach "
    "log_softmax softmax sigmoid logsigmoid tanh relu softplus exp log neg abs square pow clamp mul add sub div sum mean "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __neg__ __pow__ __eq__ __ne__ __lt__ __ge__ dropout "
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits"
)
_REDUCING = functions("sum mean")
_LIBRARIES = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[2]) + os.sep)


class Owners:
    """The row of each entry of the first axis of what was selected, in a batch of so many rows."""

    def __init__(self, rows: int):
        self.rows = rows
        self._of: Marks[torch.Tensor] = Marks()

    def of(self, t: object) -> torch.Tensor | None:
        return self._of.get(t)

    def select(self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> bool:
        """Note the rows of a selection from what was selected, or from entries in the rows' order; False if they are unknown."""
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or first.dim() == 0:
            return False
        whose, at = self.of(first), _positions(func, args, kwargs, results)
        if at is None or (whose is None and first.shape[0] % self.rows):
            return False
        found = at // (first.shape[0] // self.rows) if whose is None else whose[at]
        for result in results:
            self._of[result] = found
        return True

    def follow(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
        """Note the rows of what an operation makes of selected entries; False if rows are lost."""
        marked = [whose for t in given if (whose := self.of(t)) is not None]
        if not marked:
            return True
        index = args[1] if func is _GETS else ()
        keeps = func in _KEEPING or (isinstance(index, tuple) and index[:1] == (slice(None),))
        keeps = keeps and all(whose.shape == marked[0].shape and torch.equal(whose, marked[0]) for whose in marked)
        gone = {dim % args[0].dim() for dim in reduced(args, kwargs)} if func in _REDUCING else ()
        for result in results:
            if result.dim() and keeps and len(result) == len(marked[0]) and 0 not in gone:
                self._of[result] = marked[0]
            elif result.dim():
                return False
        return True


class SelectionMode(TorchFunctionMode):
    """Follows what is selected in a forward pass at the places that a trace found.

    Args:
        rows: of the batch.
        places: lines of the model's code that select entries whose rows are known, or compute losses of such.
    """

    def __init__(self, rows: int, places: Set[Any]):
        super().__init__()
        self.owners, self.places = Owners(rows), places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = list(tensors(out))
        if selects(func, args) and place() in self.places:
            if not self.owners.select(func, args, kwargs, results):
                raise UnsupportedUse("the data choose tokens in another way than when traced")
        elif results:
            self.owners.follow(func, args, kwargs, list(tensors((args, kwargs))), results)
        return out

    def whose(self, *given: torch.Tensor) -> torch.Tensor | None:
        """The rows of a loss function's entries; None where they are in order. Raises `UnsupportedUse` if they were lost."""
        found = [whose for t in given if (whose := self.owners.of(t)) is not None]
        if found or place() not in self.places:
            return found[0] if found else None
        raise UnsupportedUse("the data choose tokens of a loss in another way than when traced")


def selects(func: Any, args: Any) -> bool:
    """Whether an operation may select entries by the values of a tensor."""
    if func is _GETS:
        return any(isinstance(part, torch.Tensor) for part in (args[1] if isinstance(args[1], tuple) else (args[1],)))
    return func in _PICKING or func in _MASKING or (func in _FINDING and len(args) == 1)


def place() -> Any:
    """The line of code, neither torch's nor the engine's, that called an operation."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


def _positions(func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> torch.Tensor | None:
    """Where in the first axis of its first argument an operation found the entries of its results; None if nobody knows."""
    if func in _FINDING:
        return results[0].reshape(len(results[0]), -1)[:, 0] if results[0].numel() else results[0].new_zeros(0)
    index = args[1] if func is _GETS and isinstance(args[1], tuple) else (*args[1:], *kwargs.values())
    own = [part for part in index if isinstance(part, torch.Tensor)]
    if func in _MASKING:
        return own[0].expand_as(args[0]).nonzero()[:, 0] if own[0].dim() <= args[0].dim() else None
    if func in _PICKING:
        dims, columns = [part for part in index if isinstance(part, int)], own[0].reshape(len(own[0]), -1)
        known = dims and dims[0] % args[0].dim() == 0 and columns.numel() and bool((columns == columns[:, :1]).all())
        return columns[:, 0] if known else None
    if not isinstance(index[0], torch.Tensor) or any(part.shape != own[0].shape for part in own):
        return None
    if own[0].dtype == torch.bool:
        return own[0].nonzero()[:, 0] if len(own) == 1 else None
    return own[0] if own[0].dim() == 1 and own[0].dtype == torch.long else None
