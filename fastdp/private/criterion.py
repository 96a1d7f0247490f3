"""A criterion of the user's own that gives one loss per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastdp.engine.loss.boundary import require_positive

#: (output, batch) -> one loss per row, ``[rows]``.
Criterion = Callable[[Any, Any], torch.Tensor]


class _MeanBoundary(torch.autograd.Function):
    """The mean of rows' losses, whose backward divides out what the loop has made of it."""

    @staticmethod
    def forward(ctx: Any, losses: torch.Tensor) -> Any:
        ctx.rows = losses.shape[0]
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (upstream,) = gradients
        # Reading the value would synchronize with a GPU.
        if upstream.device.type == "cpu":
            require_positive(upstream)
        return torch.full_like(upstream, 1 / ctx.rows).expand(ctx.rows)


def mean_of_rows(losses: torch.Tensor, rows: int | None) -> torch.Tensor:
    """The mean of a criterion's losses, whose backward pass removes the factor that the loop applies to it.

    ``rows`` is None while the model is evaluated. Raises ValueError if there is not one loss per row.
    """
    if losses.dim() != 1 or (rows is not None and losses.shape[0] != rows):
        raise ValueError(
            f"The criterion returned losses of shape {list(losses.shape)}. Return one loss per row: use reduction='none' and "
            "average each row over its own tokens."
        )
    mean: torch.Tensor = _MeanBoundary.apply(losses)  # type: ignore[no-untyped-call]
    return mean
