"""A criterion of the user's own that gives one loss a row, and the look at whether a row's loss is its own."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from fastdp.engine.batches import Path, as_long_as, map_leaves
from fastdp.engine.between import COUPLES
from fastdp.engine.bits import DRAW
from fastdp.engine.boundary import MeanBoundary
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.layout import Ticket

#: (output, batch) -> one loss a row, ``[rows]``.
Criterion = Callable[[Any, Any], torch.Tensor]


class RowLosses:
    """The mean of a criterion's losses, of which each must be what it is without the other rows.

    A batch that only tries the loop tells which tensors carry rows: they are as many as its rows, and one where it has one.
    From then on two rows of each batch, drawn in secret, are taken alone as well; on a GPU of the 1st, 2nd, 4th, 8th ..., as the
    host has to wait for what it finds.

    Args:
        criterion: the user's own.
    """

    def __init__(self, criterion: Criterion):
        self._criterion = criterion
        self._carriers: frozenset[Path] | None = None
        self._batches = itertools.count(1)

    def mean(self, output: Any, batch: Any, ticket: Ticket | None) -> torch.Tensor:
        """The mean over the rows, whose backward divides out what the loop makes of it.

        Args:
            output, batch: for the criterion.
            ticket: of the training batch; None while the model is evaluated.

        Raises ValueError if the criterion does not return one loss a row, `SelfCheckError` if a row's is another alone.
        """
        losses = self._criterion(output, batch)
        if losses.dim() != 1 or (ticket is not None and losses.shape[0] != ticket.rows):
            raise ValueError(
                f"the criterion returned losses of shape {list(losses.shape)}: it must return one loss a row (compute token "
                "losses with reduction='none' and average each row over its own tokens)"
            )
        if ticket is not None and ticket.company is not None:
            carriers = as_long_as((output, batch), ticket.rows)
            self._carriers = carriers if self._carriers is None else self._carriers & carriers
        elif ticket is not None and self._carriers is not None and ticket.rows > 1:
            number = next(self._batches)
            if losses.device.type == "cpu" or number & (number - 1) == 0:
                self._require_own(output, batch, losses)
        mean: torch.Tensor = MeanBoundary.apply(losses)  # type: ignore[no-untyped-call]
        return mean

    def _require_own(self, output: Any, batch: Any, losses: torch.Tensor) -> None:
        carriers = self._carriers or frozenset()
        # Two, so that one of them is not the row for whose sake all others are treated otherwise.
        rows = DRAW.sample(range(losses.shape[0]), 2)
        try:
            with torch.no_grad():
                alone = [float(self._criterion(*_row(carriers, (output, batch), row))[0]) for row in rows]
                together = losses[rows].tolist()
        except (RuntimeError, ValueError, IndexError) as error:
            self._carriers = None
            warnings.warn(
                f"the criterion cannot be asked for one row of a batch, and is tried with small batches alone: {error}",
                stacklevel=4,
            )
            return
        limit = 1e-3 if losses.dtype in (torch.float32, torch.float64) else 5e-2
        for one, other in zip(alone, together):
            size = max(abs(one), abs(other), 1e-3)
            if math.isfinite(one) != math.isfinite(other) or abs(one - other) > limit * size:
                raise SelfCheckError(COUPLES)


def _row(carriers: frozenset[Path], tree: Any, row: int) -> Any:
    return map_leaves(tree, lambda path, t: t[row : row + 1] if path in carriers else t)
