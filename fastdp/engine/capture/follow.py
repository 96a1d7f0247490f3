"""What descends from the data, and what from trained parameters alone, from operation to operation of a forward pass.

*Data*: what is computed from the rows of the batch. *Chosen*: data whose first axis was chosen or ordered by the data's values
(a boolean index, `nonzero`, `unique`, a sort, a gather), so that no shape says which token belongs to whom. *Weights*: what
is computed from trained parameters and no data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fastdp.calls.batches import Call, Path, leaves, map_leaves, tensors
from fastdp.calls.flow import DataFlow
from fastdp.calls.marks import Marks
from fastdp.calls.named import functions, is_detach
from fastdp.engine.uses.rows import BatchAxis, RowAxes
from fastdp.engine.uses.selections import GROUPED, Owners, call_site, selects

#: The data decide the size of what these return, or which row comes where.
_SELECTING = functions("nonzero argwhere masked_select unique unique_consecutive bincount histc tolist")
_ORDERING = functions("sort argsort topk msort")
_GATHERING = functions("index_select gather take take_along_dim embedding")
#: These write into rows of their first argument, whose own axis stays as it was.
_SCATTERING = functions(
    "index_add index_copy index_put scatter scatter_add scatter_reduce index_reduce masked_scatter index_fill"
)
#: All that may choose.
_CHOOSING = _SELECTING | _ORDERING | _GATHERING | functions("where repeat_interleave __getitem__")


class Follow(DataFlow):
    """Follows data, and what is computed from weights alone, through one forward pass.

    Args:
        inputs: the tensors that carry ``rows``.
        weights: the trained parameters.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], weights: Iterable[torch.Tensor], rows: int):
        super().__init__(inputs)
        #: With the ids of the parameters that each is computed from.
        self.weights = Marks((t, frozenset({id(t)})) for t in weights)
        self.chosen: Marks[None] = Marks()
        self.rows, self.row_axes = rows, RowAxes(inputs, rows)
        #: Whether the data have chosen anything so far.
        self.selects = False
        #: What was selected by the data's values, the rows of its entries being known, and the calls that do it, by module.
        self.owners, self.selecting_calls = Owners(rows), set[tuple[Any, str]]()
        self.stack = [""]

    def sources(self, given: list[torch.Tensor]) -> frozenset[int]:
        """The parameters, by identity, that some of these tensors are computed from without data."""
        return frozenset().union(*filter(None, map(self.weights.get, given)))

    def follow(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], out: Any) -> bool:
        """Look at what one operation returned. True if it was given data."""
        if func is torch.Tensor.__getitem__ and args[0] in self.weights:
            # One of a stack of matrices is the same for all rows, whatever decides which.
            given = [t for t in given if t.dim()]
        found, results = super().follow(func, args, kwargs, given, out), tensors(out)
        if not found:
            sources = frozenset() if is_detach(func) else self.sources(given)
            for result in results if sources else ():
                self.weights[result] = sources
            return False
        for result in results:
            self.weights.pop(result)
        chosen = func in _CHOOSING and self._selects_first_axis(func, args, kwargs)
        self.selects |= chosen
        if self.selects:
            self._note_chosen(func, args, kwargs, given, results, chosen)
        return True

    def _note_chosen(
        self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], results: list[torch.Tensor], chosen: bool
    ) -> None:
        """Note the results whose first axis the data chose, by this operation or an earlier one."""
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if func in _SCATTERING and first is not None:
            chosen = first in self.chosen or self.is_owned(first)
        else:
            chosen = self._loses_rows(func, args, kwargs, given, results, chosen)
        if func is torch.Tensor.__setitem__:
            self.owners.write(*args)
        for result in results:
            # What is written into keeps its own axis.
            if (result in self.chosen if result is first else chosen) and result.dim() > 0:
                self.chosen[result] = None

    def is_owned(self, t: Any) -> bool:
        """Whether it was selected, the rows of its entries being known."""
        return self.owners.of(t) is not None

    def in_order(self, t: torch.Tensor) -> bool:
        """Whether the first axis of a tensor is known to hold the rows, in order."""
        found = self.row_axes.of(t)
        fold = None if found is None else found.fold(self.rows)
        return fold is not None and fold.natural

    def _loses_rows(
        self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], results: list[torch.Tensor], chosen: bool
    ) -> bool:
        """Whether the rows of an operation's results are unknown, as the data have chosen them."""
        if self.owners.restores(func, args):
            return False
        source, given = given[0], given[:1] if func in GROUPED else given
        # Whose entries are that are taken by their places, those say, whoever chose them.
        known = chosen and selects(func, args) and not self.cut.has_any(given)
        known = known and source not in self.chosen and (self.is_owned(source) or self.in_order(source))
        if known and self.owners.select(func, args, kwargs, results):
            self.selecting_calls.add((call_site(), self.stack[-1]))
            return False
        lost = chosen or self.chosen.has_any(given)
        return lost or not self.owners.follow(func, args, kwargs, given, results)

    def _selects_first_axis(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the data decide the first axis of what an operation on data returns."""

        def is_data(value: Any) -> bool:
            return isinstance(value, torch.Tensor) and value in self.data

        if func in _SELECTING:
            return True
        if func is torch.where:
            return len(args) + len(kwargs) == 1
        if func in (torch.repeat_interleave, torch.Tensor.repeat_interleave):
            return any(is_data(v) for v in (*args[1:], *kwargs.values()))
        if func in _ORDERING:
            given = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, int) and not isinstance(v, bool)]
            rank = args[0].dim()
            default = 0 if func in (torch.msort, torch.Tensor.msort) else -1
            dim = kwargs.get("dim", given[-1] if given and (len(given) > 1 or "topk" not in func.__name__) else default)
            return rank == 0 or dim % rank == 0
        if func in _GATHERING:
            indices = [v for v in (*args[1:], *kwargs.values()) if is_data(v)]
            if func is F.embedding:
                return is_data(kwargs.get("weight", args[1] if len(args) > 1 else None))
            # Rows of a constant stand where their indices do.
            if not (indices and is_data(args[0] if args else kwargs.get("input"))):
                return False
            if "index_select" in func.__name__ or func.__name__ in ("gather", "take_along_dim"):
                dims = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, int)]
                return bool(dims) and dims[0] % args[0].dim() == 0
            return True
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            first = next((i for i in index if i is not None), None)
            masks = any(is_data(i) and i.dtype in (torch.bool, torch.uint8) for i in index)
            return masks or (is_data(first) and is_data(args[0]))
        return False


class InputGradients(DataFlow):
    """Retains the gradients at a call's floating-point inputs, and at what embeddings look up for its rows.

    Args:
        call: positional and named arguments, on so many ``rows``.
        carriers: the places of the tensors that carry rows.

    Attributes:
        call: with leaves in the place of floating-point inputs, since some models set requires_grad of them.
    """

    def __init__(self, call: Call, carriers: Collection[Path], rows: int):
        self._found: list[tuple[torch.Tensor, BatchAxis]] = []

        def begin(path: Path, t: torch.Tensor) -> torch.Tensor:
            if path not in carriers or not t.is_floating_point():
                return t
            self._found.append((t.detach().clone().requires_grad_(), BatchAxis()))
            return self._found[-1][0]

        self.call: Call = map_leaves(call, begin)
        inputs = [t for path, t in leaves(self.call) if path in carriers]
        super().__init__(inputs)
        self._rows, self._row_axes = rows, RowAxes(inputs, rows)
        self._has_numbers = bool(self._found)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Whose gradients are retained."""
        return [t for t, _ in self._found]

    def clear(self) -> None:
        """Retain none."""
        self._found.clear()

    def taken(self) -> list[torch.Tensor]:
        """The gradients of one backward pass, rows first, which are then forgotten."""
        found = [t.grad for t in self.tensors]
        for t in self.tensors:
            t.grad = None
        return [t.detach() for t in self.rows_first(found)]

    def rows_first(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Gradients of the tensors, ``[rows, ...]`` each; where there is none, none."""
        pairs = zip((fold for _, fold in self._found), gradients)
        fronts = [fold.front(gradient, self._rows) for fold, gradient in pairs if gradient is not None]
        return [t if t.shape[0] == self._rows else t.reshape(self._rows, -1, *t.shape[1:]) for t in fronts]

    def follow(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], out: Any) -> bool:
        """Follow one operation, and where rows lie in what it makes of ids, and of numbers before they meet a parameter."""
        found = super().follow(func, args, kwargs, given, out)
        if not found or not isinstance(out, torch.Tensor):
            return found
        if func in (F.embedding, F.embedding_bag) and torch.is_grad_enabled():
            place = self._row_axes.of(kwargs.get("input", args[0] if args else None))
            # Ids that follow from activations may lie anywhere.
            fold = None if place is None else place.fold(self._rows)
            if fold is None or not fold.fits(tuple(out.shape), self._rows):
                return True
            if out.requires_grad:
                out.retain_grad()
            else:
                out.requires_grad_()
            self._found.append((out, fold))
        elif not out.is_floating_point() or (self._has_numbers and all(map(self._row_axes.of, given))):
            self._row_axes.follow(func, args, kwargs, given, [out])
        return True
