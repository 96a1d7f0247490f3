"""What a draw of the exponential mechanism really costs on a public table, which is less than what its scale promises.

With weights exp(-s m(x, w)) over candidates w, m a metric or one with a cap, the log ratio of two laws at w is
``s (m(x', w) - m(x, w)) + log Z_x' - log Z_x``. The scale's own figure takes the second part for as large as the first can
be. On a public table it can be computed: with scores of at most s R the bound is ``s R + max log Z - min log Z``, and for a
metric ``(s + L) m(x, x')``, L the Lipschitz constant of log Z.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

#: Entries of a block of distances.
_BLOCK = 1 << 20
#: Relative error of a sum of weights in float32: roundings of exponents below 128, of the function, and of the sum's own tree.
_OF_A_WEIGHT = 2.0**-16


def distance_error(table: Tensor) -> float:
    """An upper bound of the error of a distance that `_distances` computes from squares and products in float64."""
    wide = table.double()
    largest = float((wide - wide.mean(0)).norm(dim=1).max())
    return 2 * largest * math.sqrt((table.shape[1] + 8) * 2.0**-52)


def log_normalisers(
    table: Tensor, scales: Sequence[float], cap: float | None = None, log_prior: Tensor | None = None
) -> tuple[Tensor, float]:
    """log Z of every row of a public table [V, d] at each scale s, float64 [len(scales), V], and an upper bound of their errors.

    Distances above ``cap`` count as it. ``log_prior`` [V] is log pi_w, -inf for rows never drawn.
    """
    result = torch.empty(len(scales), len(table), dtype=torch.float64, device=table.device)
    if log_prior is not None:
        log_prior = log_prior.to(table.device)
    never = None if log_prior is None else torch.isinf(log_prior)
    prior = None if log_prior is None else log_prior.masked_fill(torch.isinf(log_prior), 0.0).float()
    for rows, distance in _distances(table, cap):
        if never is not None:
            distance[:, never] = math.inf
        # What a row's candidates have in common goes first, so that float32 is exact where a weight counts.
        least = distance.amin(1, keepdim=True)
        beyond = (distance - least).float()
        for at, scale in enumerate(scales):
            exponent = -scale * beyond
            if prior is not None:
                exponent += prior
            top = exponent.amax(1, keepdim=True)
            sums = exponent.sub_(top).exp_().sum(1).double()
            result[at, rows] = sums.log() + top[:, 0].double() - scale * least[:, 0]
    return result, _OF_A_WEIGHT + max(scales) * distance_error(table)


def lipschitz(table: Tensor, logs: Tensor, error: float, limit: float) -> float:
    """The Lipschitz constant of log Z among the rows, at one scale: an upper bound, and at most ``limit``.

    ``logs`` [V] and ``error`` are as `log_normalisers` returns them; ``limit`` is what the triangle inequality promises, which
    pairs too near to be measured are held to.
    """
    found = 0.0
    lost = distance_error(table)
    for rows, distance in _distances(table, None):
        distance = (distance - lost).clamp_min(0.0)
        steepness = ((logs[rows, None] - logs).abs() + 2 * error) / distance
        found = max(found, float(steepness.clamp_(max=limit).masked_fill_(distance <= 0, 0.0).max()))
    return found


def _distances(table: Tensor, cap: float | None) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows with their distances to all rows, float64; exactly 0 from a row to itself."""
    wide = table.double()
    wide = wide - wide.mean(0)
    squares = wide.square().sum(1)
    step = max(1, _BLOCK // len(wide))
    for begin in range(0, len(wide), step):
        rows = slice(begin, min(begin + step, len(wide)))
        products = torch.addmm(squares[None, :], wide[rows], wide.T, alpha=-2.0) + squares[rows, None]
        distance = products.clamp_min_(0.0).sqrt_()
        distance[torch.arange(rows.stop - rows.start), torch.arange(rows.start, rows.stop)] = 0.0
        yield rows, distance if cap is None else distance.clamp_(max=cap)
