"""Rank-one axes: gradients are clipped, added up and noised in coordinates of their own scale, without being made for it.

With s_ij = a_i b_j the gradient G = sum_t L_t R_t^T over s is sum_t (L_t / a)(R_t / b)^T, a pair of factors again. Norms, sums
and noise are then those of the scaled factors: what is clipped to |G / s| <= C and noised with std sigma C is one Gaussian
mechanism of multiplier sigma, and multiplying the released gradient by s afterwards costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fastdp.engine.uses.factors import Factors
from fastdp.engine.uses.layout import Layout
from fastdp.engine.uses.use import Sink


@dataclass(frozen=True)
class RankOne:
    """Axes of one parameter, public or released: a for its first dimension, b for all others together.

    Args:
        rows: a, positive, ``[shape[0]]``.
        columns: b, positive, ``[numel / shape[0]]``; one number for a vector.

    Raises ValueError for axes that are not positive and finite.
    """

    rows: Tensor
    columns: Tensor
    #: What the two factors are multiplied by, float32.
    _scales: tuple[Tensor, Tensor] = field(init=False, repr=False, compare=False)
    #: Whether all of them are 1: nothing is scaled then, and sums are to the last bit those without axes.
    even: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for axes in (self.rows, self.columns):
            if axes.dim() != 1 or not bool((torch.isfinite(axes) & (axes > 0)).all()):
                raise ValueError("axes are vectors of positive, finite numbers")
        object.__setattr__(self, "_scales", (self.rows.float().reciprocal(), self.columns.float().reciprocal()))
        object.__setattr__(self, "even", all(bool((axes == 1).all()) for axes in (self.rows, self.columns)))

    def check(self, name: str, shape: torch.Size) -> None:
        """Raise ValueError unless they are a parameter's."""
        rows = shape[0] if shape else 1
        if (len(self.rows), len(self.columns)) != (rows, math.prod(shape) // max(rows, 1)):
            raise ValueError(
                f"the axes of {name} have {len(self.rows)} rows and {len(self.columns)} columns; the parameter is {list(shape)}"
            )

    def whole(self, shape: torch.Size) -> Tensor:
        """s, float32 of the parameter's shape."""
        return torch.outer(self.rows, self.columns).float().view(shape)

    def scaled(self, factors: Factors) -> Factors:
        """Factors of G / s."""
        factors = factors.dense()
        own = factors.times(*reversed(self._scales)) if factors.swap else factors.times(*self._scales)
        # Products of 16 bits stay that.
        return replace(own, left=own.left.to(factors.left.dtype), right=own.right.to(factors.right.dtype))

    def over(self, gradients: Tensor, shape: torch.Size) -> Tensor:
        """Whole gradients of a parameter of this shape, ``[..., *shape]`` in any view, over s."""
        every = torch.outer(*self._scales).reshape(-1)
        return (gradients.reshape(-1, len(every)) * every).to(gradients.dtype).view(gradients.shape)

    def along(self, gradient: Tensor, rows: Tensor) -> None:
        """Multiply a gradient over s by the columns of s and by ``rows``, all of s or some, perhaps over a number; in place.

        The gradient is contiguous, float32, and what belongs to these rows.
        """
        gradient.view(len(rows), len(self.columns)).mul_(rows.float().unsqueeze(1)).mul_(self.columns.float())


class ScalingSink:
    """A sink that passes captures on to another in the coordinates of their parameters' axes.

    Args:
        sink: receives every capture.
        axes: by the name of a parameter; the captures of others pass as they are.
        names: of the trained parameters, by identity.
    """

    def __init__(self, sink: Sink, axes: Mapping[str, RankOne], names: Mapping[int, str]):
        self.sink, self.axes, self.names = sink, axes, names

    def matrix(self, parameter: torch.nn.Parameter, factors: Factors, layout: Layout) -> None:
        own = self._of(parameter)
        self.sink.matrix(parameter, factors if own is None else own.scaled(factors), layout)

    def vector(self, parameter: torch.nn.Parameter, lanes: Tensor, layout: Layout) -> None:
        self.sink.vector(parameter, self._whole(parameter, lanes), layout)

    def tokens(self, parameter: torch.nn.Parameter, gradient: Tensor, layout: Layout, laned: bool) -> None:
        self.sink.tokens(parameter, self._whole(parameter, gradient), layout, laned)

    def instances(self, parameter: torch.nn.Parameter, gradients: Tensor, layout: Layout) -> None:
        self.sink.instances(parameter, self._whole(parameter, gradients), layout)

    def _of(self, parameter: torch.nn.Parameter) -> RankOne | None:
        own = self.axes.get(self.names[id(parameter)])
        return None if own is None or own.even else own

    def _whole(self, parameter: torch.nn.Parameter, gradients: Tensor) -> Tensor:
        own = self._of(parameter)
        return gradients if own is None else own.over(gradients, parameter.shape)
