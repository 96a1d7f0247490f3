"""Which parameters are trained, and what the trace knows of the reads of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch

from fastdp.engine.errors import UnseenUse, UnsupportedUse
from fastdp.engine.uses.lanes import PerExampleParameter
from fastdp.engine.uses.logits import Heads
from fastdp.engine.uses.rows import BatchAxis
from fastdp.engine.uses.selections import Selection
from fastdp.engine.uses.use import CaptureContext

_MOST_KNOWN = 1 << 14


class Reads:
    """Which parameters are trained, and for each read of one whether its input carries rows.

    ``context`` is set while a training forward pass (or the recomputation of a checkpointed piece of it) runs.
    """

    def __init__(self, trained: dict[str, torch.nn.Parameter]):
        # `Passes` keeps them for as long as this, so that nothing else can come to have the identity of one.
        self.names = {id(p): name for name, p in trained.items()}
        self.learn({}, frozenset())
        self.context: CaptureContext | None = None
        self.mode_open = False
        self.heads = Heads()

    def learn(self, carries_rows: Mapping[tuple[str, str, int], BatchAxis | None], selecting: Set[str]) -> None:
        """Take what a trace found: where the rows of inputs lie, by operation, parameter and dimensions."""
        self._carries_rows = carries_rows
        #: Names of modules that select, by the data's values, what a parameter or a loss sees.
        self.selecting = selecting
        #: What uses came to, by the operation, the identity of the parameters, which live on, and the input's shape and rows.
        self.known: dict[tuple[Any, ...], Any] = {}
        # Where the data choose rows, a shape does not tell whose they are.
        self._keeps = not any(fold is not None and fold.chosen for fold in carries_rows.values())

    def keep(self, use: tuple[Any, ...], found: Any) -> None:
        """Know what a use came to from here on."""
        if self._keeps:
            if len(self.known) >= _MOST_KNOWN:
                self.known.clear()
            self.known[use] = found

    def is_trained(self, value: Any) -> bool:
        return id(value) in self.names

    def serve(self, *values: Any) -> bool:
        """Whether some of these are trained parameters, and none was computed from parameters."""
        return any(map(self.is_trained, values)) and not any(isinstance(value, PerExampleParameter) for value in values)

    def refuse_coupled_table(self, table: Any, max_norm: Any, scale_grad_by_freq: bool) -> None:
        """Raise ValueError for a lookup that changes a table, or scales its gradient, by what the batch holds."""
        if max_norm is not None or scale_grad_by_freq:
            raise ValueError(
                f"{self.names[id(table)]}: an embedding with max_norm or scale_grad_by_freq couples examples; unset it"
            )

    def require_rows(self, operation: str, parameters: Iterable[Any], x: Any, context: CaptureContext) -> None:
        """Raise `UnsupportedUse` unless an operation's input carries rows, in order in its first axis, as the trace saw it."""
        parameter = next(p for p in parameters if self.is_trained(p))
        fold = None if isinstance(x, PerExampleParameter) else self.fold(operation, parameter, x, context)
        if fold is None:
            raise UnsupportedUse(f"{operation} of an input without rows")
        if not fold.natural:
            raise UnsupportedUse(
                f"{self.names[id(parameter)]}: the rows of the input of {operation} are not in order, first"
            )

    def fold(
        self, operation: str, parameter: torch.nn.Parameter, x: torch.Tensor, context: CaptureContext
    ) -> BatchAxis | Selection | None:
        """Where the rows of an operation's input lie; None if it has none. Raises `UnsupportedUse` for an unseen use."""
        key = (operation, self.names[id(parameter)], x.dim())
        if key not in self._carries_rows:
            raise UnseenUse(f"{key[1]}: {operation} of an input of {x.dim()} dimensions, unseen when traced")
        fold = self._carries_rows[key]
        context.note(operation, x, fold)
        if context.layout.token_segments is not None and fold is not None and not fold.natural:
            raise UnsupportedUse(f"{key[1]}: packed rows are not first in the input of {operation}")
        return context.selection(x) if fold is not None and fold.chosen else fold
