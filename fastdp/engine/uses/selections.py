"""Whose the tokens are that a forward pass selects, or sorts, by the data's values: followed to what reads them.

Tokens that a mixture of experts sorts by expert stand, after the inverse of the same permutation, where they stood.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Set
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastdp.calls.batches import tensors
from fastdp.calls.flow import GROUPED
from fastdp.calls.marks import Marks
from fastdp.calls.named import functions
from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.uses.rows import reduced

_FINDING = functions("nonzero argwhere") | {torch.where}
_PICKING = functions("gather take_along_dim index_select")
_MASKING = functions("masked_select")
_GETS = torch.Tensor.__getitem__
_SORTING = functions("sort argsort")
#: These keep the entries of a first axis whose length stays, in their order.
_KEEPS = (
    "view reshape flatten unsqueeze squeeze expand expand_as float double half bfloat16 to type_as long contiguous clone detach "
    "log_softmax softmax sigmoid logsigmoid tanh relu softplus exp log neg abs square pow clamp mul add sub div sum mean "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __neg__ __pow__ __eq__ __ne__ eq ne lt le gt ge dropout "
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits "
    "silu gelu elu selu mish leaky_relu relu6 hardswish rsqrt sqrt clamp_min clamp_max chunk masked_fill "
    "__floordiv__ floor_divide multiply layer_norm rms_norm"
)
_KEEPING = functions(" ".join(f"{name} {name}_" for name in _KEEPS.split()))  # with the forms that write in place
#: These keep those of their first argument.
_FIRST = functions("linear matmul mm __matmul__ bmm addmm") | GROUPED
_REDUCING = functions("sum mean")
_LIBRARIES = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[2]) + os.sep)


class Selection:
    """The rows of what the data selected, in the place of a `BatchAxis`.

    Args:
        owners: keep them.
        whose: the row of each entry of the first axis.
        lane_units, units: of the layout.
    """

    axis, natural = 0, False

    def __init__(self, owners: Owners, whose: torch.Tensor, lane_units: torch.Tensor, units: int):
        self.owners, self.whose, self.count = owners, whose, units
        #: The unit of each entry.
        self.units = lane_units[whose]

    @cached_property
    def _order(self) -> torch.Tensor:
        return self.whose.argsort(stable=True)

    def front(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """The same entries in the order of their rows."""
        return x[self._order]

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `front`."""
        return x[self._order.argsort()]

    def unit_offsets(self, tokens: int) -> torch.Tensor:
        """Where units begin among so many tokens, as many of each entry, in the rows' order: int64 ``[units + 1]``."""
        offsets = torch.searchsorted(self.units[self._order], torch.arange(self.count + 1, device=self.whose.device))
        return offsets * (tokens // max(1, self.whose.shape[0]))

    def spread(self, lanes: torch.Tensor, size: int, rows: int) -> torch.Tensor:
        """One entry a row laid along the axis."""
        return lanes[self.whose]

    def follow(self, t: torch.Tensor) -> torch.Tensor:
        """Note that a tensor has the same rows."""
        self.owners.note(t, self.whose)
        return t


class Owners:
    """The row of each entry of the first axis of what was selected, in a batch of so many rows.

    ``compares`` says that tensors which meet must have equal rows; without it, as on a GPU in training, as many will do.
    """

    def __init__(self, rows: int, *, compares: bool = True):
        self.rows, self._compares = rows, compares
        self._of: Marks[torch.Tensor] = Marks()
        #: Permutations that sorts found, and their inverses, each with the rows of what is put into that order.
        self._permutations: Marks[torch.Tensor] = Marks()
        self._inverses: Marks[torch.Tensor] = Marks()

    def of(self, t: object) -> torch.Tensor | None:
        return self._of.get(t)

    def note(self, t: torch.Tensor, whose: torch.Tensor) -> None:
        """Note the rows of a tensor's entries."""
        self._of[t] = whose

    def select(self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> bool:
        """Note the rows of a selection from what was selected, or from entries in the rows' order; False if they are unknown."""
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or first.dim() == 0:
            return False
        whose, at = self.of(first), _positions(func, args, kwargs, results)
        if at is None or (whose is None and first.shape[0] % self.rows):
            return False
        found, own = at // (first.shape[0] // self.rows) if whose is None else whose[at], self.of(at)
        if own is not None and self._equal(own, found):
            # What one permutation orders is known again by one tensor of rows.
            found = own
        if func in _SORTING and first in self._permutations:
            self._inverses[at] = self._permutations[first]
        elif func in _SORTING and whose is None:
            self._permutations[at] = found
        for result in results:
            self._of[result] = found
        return True

    def write(self, target: torch.Tensor, where: Any, value: Any) -> None:
        """Note a permutation's inverse, written by its definition into a tensor of as many entries."""
        self._inverses.pop(target)
        alike = isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape == target.shape
        if where in self._permutations and alike and torch.equal(value, torch.arange(len(value), device=value.device)):
            self._inverses[target] = self._permutations[where]

    def restores(self, func: Any, args: Any) -> bool:
        """Whether an operation puts tokens back to where a sort had taken them from, whatever the data are."""
        whose = self._inverses.get(args[1]) if func is _GETS else None
        return whose is not None and whose is self.of(args[0])

    def follow(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
        """Note the rows of what an operation makes of selected entries; False if rows are lost."""
        marked = [whose for t in given if (whose := self.of(t)) is not None]
        if not marked:
            return True
        index = args[1] if func is _GETS else ()
        if isinstance(index, tuple):
            keeps = func in _KEEPING or (index[:1] == (slice(None),) or index[:1] == (...,))
        else:
            # A lookup in a table of no data, by what was selected.
            keeps = self.of(index) is not None and self.of(args[0]) is None
        keeps = keeps or (func in _FIRST and self.of(args[0]) is not None)
        keeps = keeps and all(whose is marked[0] or self._equal(whose, marked[0]) for whose in marked)
        gone = {dim % args[0].dim() for dim in reduced(args, kwargs)} if func in _REDUCING else ()
        for result in results:
            if result.dim() and keeps and len(result) == len(marked[0]) and 0 not in gone:
                self._of[result] = marked[0]
            elif result.dim():
                return False
        return True

    def _equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return one.shape == other.shape and (not self._compares or torch.equal(one, other))


class SelectionMode(TorchFunctionMode):
    """Follows what is selected in a forward pass at the places that a trace found.

    Args:
        rows: of the batch.
        call_sites: calls in the model's code that select entries whose rows are known, or compute losses of such.
        compares: see `Owners`.
    """

    def __init__(self, rows: int, call_sites: Set[Any], *, compares: bool):
        super().__init__()
        self.owners, self.call_sites = Owners(rows, compares=compares), call_sites
        self.is_open = False

    def __enter__(self) -> Any:
        self.is_open = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.is_open = False
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = list(tensors(out))
        if selects(func, args) and call_site() in self.call_sites:
            if not self.owners.select(func, args, kwargs, results):
                raise UnsupportedUse("the data choose tokens in another way than when traced")
        elif results:
            self.owners.follow(func, args, kwargs, list(tensors((args, kwargs))), results)
        return out

    def whose(self, *given: torch.Tensor) -> torch.Tensor | None:
        """The rows of a loss function's entries; None where they are in order. Raises `UnsupportedUse` if they were lost."""
        found = [whose for t in given if (whose := self.owners.of(t)) is not None]
        if found or call_site() not in self.call_sites:
            return found[0] if found else None
        raise UnsupportedUse("the data choose tokens of a loss in another way than when traced")


def selects(func: Any, args: Any) -> bool:
    """Whether an operation may select entries by the values of a tensor."""
    if func is _GETS:
        return any(isinstance(part, torch.Tensor) for part in (args[1] if isinstance(args[1], tuple) else (args[1],)))
    if func in _SORTING:
        return args[0].dim() == 1
    return func in _PICKING or func in _MASKING or (func in _FINDING and len(args) == 1)


def call_site() -> Any:
    """The call, in code that is neither torch's nor the engine's, that led to an operation."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def _positions(func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> torch.Tensor | None:
    """Where in the first axis of its first argument an operation found the entries of its results; None if nobody knows."""
    if func in _SORTING:
        return results[-1]
    if func in _FINDING:
        return results[0].reshape(len(results[0]), -1)[:, 0] if results[0].numel() else results[0].new_zeros(0)
    index = args[1] if func is _GETS and isinstance(args[1], tuple) else (*args[1:], *kwargs.values())
    own = [part for part in index if isinstance(part, torch.Tensor)]
    if func in _MASKING:
        return own[0].expand_as(args[0]).nonzero()[:, 0] if own[0].dim() <= args[0].dim() else None
    if func in _PICKING:
        dims, columns = [n for n in index if isinstance(n, int)], torch.atleast_1d(own[0]).unsqueeze(-1).flatten(1)
        known = dims and dims[0] % args[0].dim() == 0 and columns.shape[1] and bool((columns == columns[:, :1]).all())
        return columns[:, 0] if known else None
    if not isinstance(index[0], torch.Tensor) or any(part.shape != own[0].shape for part in own):
        return None
    if own[0].dtype == torch.bool:
        return own[0].nonzero()[:, 0] if len(own) == 1 else None
    return own[0] if own[0].dim() == 1 and own[0].dtype == torch.long else None
