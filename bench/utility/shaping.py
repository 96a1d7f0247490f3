"""What noise along axes can gain under Adam, from gradients as they are: a measure of ceilings, without any privacy.

Let every example be clipped, m = E g and M = E g^2 by coordinate. Along axes s a coordinate has signal over noise
x = k |m| y, with y = 1 / (s sqrt(sum(M / s^2))) and k the expected batch size over the noise multiplier, and Adam's step there
is x / sqrt(1 + x^2) learning rates in the mean. All coordinates together take sum(|m| x / sqrt(1 + x^2)) off the loss, to first
order, and move as far whatever the axes. This is concave in y, and all y with sum(M y^2) = 1 can be had: one choice is best.
Where noise dominates it is s = M / m^2, by Cauchy and Schwarz, and nothing is gained if all coordinates agree alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from fastdp.methods.rapft.axes import Moments, taken


def less_noise(found: Mapping[str, Moments], ratio: float, axes: Mapping[str, Tensor] | None = None) -> float:
    """By how much less noise DP-SGD would do as well as along ``axes``, or along the best that there are; k is ``ratio``.

    ``axes`` broadcast to the parameters.
    """
    mean, squares = (torch.cat([own[i].double().reshape(-1) for own in found.values()]) for i in (0, 1))
    mean = mean.abs()
    if axes is None:
        y = _best(mean, squares, ratio)
    else:
        y = 1 / torch.cat([axes[name].double().expand(own.mean.shape).reshape(-1) for name, own in found.items()])
        y /= (squares * y.square()).sum().sqrt()
    wanted = taken(mean, ratio * y * mean)
    even = ratio * mean / squares.sum().sqrt()
    return _root(lambda factor: taken(mean, factor * even) < wanted, 1e-3, 1e3)


def _best(mean: Tensor, squares: Tensor, ratio: float) -> Tensor:
    """y where the derivative k |m|^2 (1 + x^2)^(-3/2) is the same multiple of M y everywhere."""
    seen = squares > 0
    slope, known = (ratio * mean[seen]).cpu().numpy(), squares[seen].cpu().numpy()
    # With x = k |m| y that is x (1 + x^2)^(3/2) = k^2 |m|^3 / (multiple M), turned round along a fine line.
    line = np.linspace(-30, 12, 20_000)
    of_line = line + 1.5 * np.log1p(np.exp(2 * line))
    wanted = np.log(np.maximum(slope**2 * mean[seen].cpu().numpy() / known, 1e-300))

    def at(multiple: float) -> np.ndarray:
        return np.exp(np.interp(wanted - math.log(multiple), of_line, line)) / np.maximum(slope, 1e-150)

    multiple = _root(lambda guess: bool((known * at(guess) ** 2)[slope > 0].sum() > 1), 1e-9, 1e9)
    y = torch.zeros_like(mean)
    y[seen] = torch.from_numpy(np.where(slope > 0, at(multiple), 0.0)).to(y)
    return y


def _root(low_at: Callable[[float], bool], low: float, high: float) -> float:
    """Where a condition that holds of small numbers ends, by halving ratios."""
    for _ in range(45):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if low_at(middle) else (low, middle)
    return low
