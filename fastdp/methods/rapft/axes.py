"""Relevance as axes: each coordinate's own scale, of rank one in every matrix, so that clipping to it stays exact and cheap.

`masks` sorts coordinates into two blocks; axes keep what relevance says of rows and columns. s_ij = a_i b_j with a and b the
means of what is known of rows and columns, to a power. Coordinates with a large axis are allowed more of the clipped norm, and
get more of the noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastdp.calls.batches import accepted
from fastdp.engine.clip.axes import RankOne
from fastdp.engine.loss.boundary import find_loss

#: Least mean of a row or column, over that of its parameter: what seems to be nothing may come to matter.
_LEAST = 1e-2


def rank_one(sizes: Mapping[str, Tensor], power: float) -> dict[str, RankOne]:
    """Axes from what is known of each coordinate's size, [shape] at least 0 by parameter; those of one that is all 0 are even.

    Over all coordinates the mean of s^2 is 1, so that evenly distributed noise stays as it was.
    """
    flat = {name: size.double().reshape(size.shape[0] if size.dim() else 1, -1) for name, size in sizes.items()}
    if not all(bool(torch.isfinite(size).all()) for size in flat.values()):
        raise ValueError("what the axes follow is not finite: raise the epsilon of the propagation rule")
    means = {name: float(size.mean()) for name, size in flat.items()}
    known = [mean for mean in means.values() if mean > 0]
    middle = sum(known) / len(known) if known else 1.0
    parts = {}
    for name, size in flat.items():
        mean = means[name] or 1.0
        # Of a matrix of rank one the product of row and column means is the matrix times its mean.
        rows = (size.mean(1) / mean).clamp_min(_LEAST) if means[name] > 0 else torch.ones_like(size[:, 0])
        columns = (size.mean(0) / mean).clamp_min(_LEAST) if means[name] > 0 else torch.ones_like(size[0])
        parts[name] = (rows * (means[name] or middle)).pow(power), columns.pow(power)
    squares = sum(float(a.square().sum() * b.square().sum()) for a, b in parts.values())
    scale = (squares / sum(size.numel() for size in flat.values())) ** -0.5
    return {name: RankOne(a * scale, b) for name, (a, b) in parts.items()}


def second_moments(model: torch.nn.Module, batches: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Root mean squares over batches of the gradients of **public** batches, by trained parameter."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    squares = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in trained.items()}
    count = 0
    for batch in batches:
        args, kwargs = accepted(model, batch)
        loss = find_loss(model(*args, **kwargs), only=True)
        if loss is None:
            raise ValueError("the model returned no loss: sizes of gradients need batches with labels")
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        for square, gradient in zip(squares.values(), found):
            if gradient is not None:
                square.addcmul_(gradient.float(), gradient.float())
        count += 1
    if not count:
        raise ValueError("there are no public batches to take sizes of gradients from")
    return {name: (square / count).sqrt() for name, square in squares.items()}


def join_axes(axes: Mapping[str, RankOne]) -> dict[str, Tensor]:
    """Rows and columns of each parameter, one behind the other, as an outcome keeps them."""
    return {name: torch.cat([axis.rows, axis.columns]) for name, axis in axes.items()}


def axes_of(outcome: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, RankOne]:
    """The axes that `join_axes` made an outcome of."""
    rows = {name: parameters[name].shape[0] if parameters[name].dim() else 1 for name in outcome}
    return {name: RankOne(both[: rows[name]], both[rows[name] :]) for name, both in outcome.items()}
