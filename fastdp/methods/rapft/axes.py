"""Relevance as axes: each coordinate's own scale, of rank one in every matrix, so that clipping to it stays exact and cheap.

`masks` sorts coordinates into two blocks; axes keep what relevance says of rows and columns. s_ij = a_i b_j with a and b the
means of what is known of rows and columns, to a power. Coordinates with a large axis are allowed more of the clipped norm, and
get more of the noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdp.engine.axes import RankOne
from fastdp.engine.boundary import find_loss

#: Least mean of a row or column, over that of its parameter: what seems to be nothing may come to matter.
_LEAST = 1e-2
#: Powers that `fitted_axes` chooses among, and how much more than even axes it wants of another: a mean of few gradients promises
#: a little too much.
_POWERS, _MARGIN = (0.0, 0.125, 0.25, 0.5), 1.02


class Moments(NamedTuple):
    """Of single examples' gradients, in a parameter's shape: their mean, and the mean of their squares."""

    mean: Tensor
    square: Tensor


def rank_one(sizes: Mapping[str, Tensor], power: float) -> dict[str, RankOne]:
    """Axes from what is known of each coordinate's size, [shape] at least 0 by parameter; those of one that is all 0 are even.

    Over all coordinates the mean of s^2 is 1, so that evenly distributed noise stays as it was.

    Raises ValueError for sizes that are not finite, or a power outside [0, 1].
    """
    if not 0 <= power <= 1:
        raise ValueError(f"axes_power is {power}: it must lie between 0, where all axes are even, and 1")
    known = {name: own.double().reshape(own.shape[0] if own.dim() else 1, -1) for name, own in sizes.items()}
    if not all(bool(torch.isfinite(own).all()) for own in known.values()):
        raise ValueError("what the axes follow is not finite: raise the epsilon of the propagation rule")
    means = {name: float(own.mean()) for name, own in known.items()}
    middle = _mean([mean for mean in means.values() if mean > 0])
    parts = {}
    for name, own in known.items():
        mean = means[name] or 1.0
        # Of a matrix of rank one the product of row and column means is the matrix times its mean.
        rows = (own.mean(1) / mean).clamp_min(_LEAST) if means[name] > 0 else torch.ones_like(own[:, 0])
        columns = (own.mean(0) / mean).clamp_min(_LEAST) if means[name] > 0 else torch.ones_like(own[0])
        parts[name] = (rows * (means[name] or middle)).pow(power), columns.pow(power)
    squares = sum(float(a.square().sum() * b.square().sum()) for a, b in parts.values())
    scale = (squares / sum(own.numel() for own in known.values())) ** -0.5
    return {name: RankOne(a * scale, b) for name, (a, b) in parts.items()}


def gradient_moments(
    model: torch.nn.Module, batches: Iterable[Mapping[str, Any]], dtype: torch.dtype = torch.float32
) -> dict[str, Moments]:
    """Moments over batches of the gradients of **public** batches, by trained parameter.

    Raises ValueError without batches, or for a model that returns no loss.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: Moments(*(torch.zeros_like(p, dtype=dtype) for _ in range(2))) for name, p in trained.items()}
    count = 0
    for batch in batches:
        loss = find_loss(model(**batch))
        if loss is None:
            raise ValueError("the model returned no loss: moments of gradients need batches with labels")
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        for own, gradient in zip(sums.values(), found):
            if gradient is not None:
                gradient = gradient.to(dtype)
                own.mean.add_(gradient)
                own.square.addcmul_(gradient, gradient)
        count += 1
    if not count:
        raise ValueError("there are no public batches to take moments of")
    return {name: Moments(own.mean / count, own.square / count) for name, own in sums.items()}


def second_moments(model: torch.nn.Module, batches: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Root mean squares of the gradients of **public** batches, by trained parameter: what `PublicMoments` takes.

    Call it before `make_private`, on a model whose trained parameters are not at zero (`warm_up`), or nothing reaches LoRA's A.

    Raises ValueError as `gradient_moments`.
    """
    return {name: own.square.sqrt() for name, own in gradient_moments(model, batches).items()}


def fitted_axes(found: Mapping[str, Moments], ratio: float) -> dict[str, RankOne]:
    """The `rank_one` of gradients' sizes, to the power by which a step of Adam promises most; even if none promises more.

    What a step promises is derived in docs/rapft.md.

    Args:
        found: of single public examples.
        ratio: the expected batch size over the noise multiplier.
    """
    sizes = {name: own.square.sqrt() for name, own in found.items()}
    axes = {power: rank_one(sizes, power) for power in _POWERS}
    promises = {power: promised(found, ratio, own) for power, own in axes.items()}
    best = max(_POWERS, key=lambda power: promises[power])
    return axes[best if promises[best] > _MARGIN * promises[0.0] else 0.0]


def promised(found: Mapping[str, Moments], ratio: float, axes: Mapping[str, RankOne]) -> float:
    """What a step of Adam takes off the loss, to first order and in learning rates, with noise along axes; as `fitted_axes`."""
    whole = {name: own.whole(found[name].mean.shape).double() for name, own in axes.items()}
    norm = sum(float((own.square / whole[name].square()).sum()) for name, own in found.items()) ** 0.5
    if norm == 0:
        return 0.0
    return sum(taken(own.mean.double(), ratio * own.mean / (norm * whole[name])) for name, own in found.items())


def taken(mean: Tensor, visible: Tensor) -> float:
    """The same by each coordinate's signal over its noise: where that is x, Adam moves it by x / sqrt(1 + x^2) in the mean."""
    x = visible.abs()
    return float((mean.abs() * x / (1 + x.square()).sqrt()).sum())


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 1.0
