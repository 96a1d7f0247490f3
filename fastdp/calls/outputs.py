"""Where the rows of a model's outputs lie: the engine takes them rows first, and the loop gets what the model made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from fastdp.calls.batches import Path, leaves, map_leaves, tensors

NO_ROWS = (
    "The loss uses an output without a row for each example. Return one value each, or compute the whole loss in the "
    "model, without loss_reduction."
)


class SharedOutput(torch.autograd.Function):
    """An output that has no row for each example: no loss may use it."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(NO_ROWS)

    @classmethod
    def made(cls, t: torch.Tensor) -> bool:
        """Whether a tensor comes from here."""
        return type(t.grad_fn).__name__ == f"{cls.__name__}Backward"


def differentiable(output: Any) -> list[torch.Tensor]:
    """The tensors in what a model returned that a criterion outside it may be computed from."""
    return [t for t in tensors(output) if t.dim() and t.requires_grad and not (t.is_leaf or SharedOutput.made(t))]


def differentiable_outputs(output: Any) -> list[torch.Tensor]:
    """The same. Raises ValueError if there is nothing."""
    found = differentiable(output)
    if not found:
        raise ValueError("the model returned no tensor that a loss could be computed from")
    return found


class OutputRows:
    """The axes of rows in what a model returns.

    Args:
        axes: for each output with rows where they lie (`fastdp.engine.uses.rows.BatchAxis`), and how many dimensions it has.
        without: the places of outputs that are the same size for any number of rows.
    """

    def __init__(self, axes: Mapping[Path, tuple[Any, int]] = {}, without: Collection[Path] = ()):
        self._axes, self._without = axes, without
        #: How many dimensions those have whose rows the model puts first.
        self.in_front = {path: dims for path, (axis, dims) in axes.items() if axis.natural}
        #: Whether there are outputs, and none that may be a loss.
        self.all_have_rows = bool(axes) and not without
        #: Whether there may be several losses.
        self.may_be_losses = len(without) > 1

    def first(self, output: Any, rows: int) -> Any:
        """The output with rows first, each tensor ``[rows, ...]``; squeeze() may have left out the axis of one row."""

        def front(path: Path, t: torch.Tensor) -> torch.Tensor:
            if path not in self._axes:
                if not t.requires_grad:
                    return t
                if path in self._without:
                    return SharedOutput.apply(t)
                return t.unsqueeze(0) if rows == 1 and t.shape[:1] != (1,) else t
            batch_axis, dims = self._axes[path]
            if t.dim() < dims:
                return t.unsqueeze(0)
            if t.shape[batch_axis.axis] % rows:
                return t
            t = batch_axis.front(t, rows)
            return t if t.shape[0] == rows else t.unflatten(0, (rows, -1))

        return map_leaves(output, front)

    def as_returned(self, output: Any) -> Any:
        """The inverse of `first`."""

        def back(path: Path, t: torch.Tensor) -> torch.Tensor:
            batch_axis, dims = self._axes.get(path, (None, 0))
            if batch_axis is None or (batch_axis.natural and t.dim() <= dims):
                return t
            return batch_axis.back(t if batch_axis.inner or t.dim() <= dims else t.flatten(0, 1))

        return map_leaves(output, back)

    def of(self, output: Any) -> list[torch.Tensor]:
        """The floating-point outputs with rows."""
        return [t for path, t in leaves(output) if path in self._axes and t.is_floating_point()]
