"""PrivUnit: a unit vector told at a pure epsilon, without bias and with the least error there is (Bhowmick et al. 2018).

Asi, Feldman and Talwar (2022) show that no other unbiased mechanism of epsilon-local privacy errs less. With probability p a
point is drawn evenly from the cap {v: <v, u> >= gamma} of the sphere around the vector u, otherwise from the rest; divided by
the mean of <v, u> it has mean u. Cap and rest have shares q and 1 - q of the sphere, so that the densities are p / q and
(1 - p) / (1 - q), and epsilon = ln(p / (1 - p)) + ln((1 - q) / q).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from scipy import special
from torch import Tensor

from fastdp.ops.dchi import uniforms
from fastdp.ops.noise import standard_normals
from fastdp.ops.stream import NoiseStream, chacha_words

#: Caps that are tried: shares of the sphere from one half down, by quarters of a nat.
_CAPS = 160
#: Relative room in epsilon for the rounding of q, p and the sides' probabilities.
_ROOM = 1e-9


@dataclass(frozen=True)
class Cap:
    """A cap and how often it is drawn from.

    Attributes:
        dimension: of the vectors.
        gamma: least inner product of the cap's points with the vector, in [0, 1).
        share: q, of the sphere.
        probability: p.
        mean: of the inner product of a draw with the vector, by which draws are divided.
    """

    dimension: int
    gamma: float
    share: float
    probability: float
    mean: float

    @property
    def epsilon(self) -> float:
        """What the draw costs: the log of the densities' ratio."""
        p, q = self.probability, self.share
        return math.log(p) - math.log1p(-p) + math.log1p(-q) - math.log(q)

    @property
    def variance(self) -> float:
        """Mean squared error of the estimate of a unit vector: 1 / mean^2 - 1."""
        return 1 / self.mean**2 - 1


@lru_cache(maxsize=64)
def best_cap(dimension: int, epsilon: float) -> Cap:
    """The cap of least error for an epsilon, of `_CAPS` shares tried. Raises ValueError for values out of range."""
    if isinstance(dimension, bool) or not isinstance(dimension, int) or dimension < 2:
        raise ValueError(f"PrivUnit needs vectors of at least two numbers, not {dimension!r}")
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon of PrivUnit is {epsilon}: it must be a positive number")
    found = (_cap(dimension, epsilon * (1 - _ROOM), math.exp(-step / 4) / 2) for step in range(_CAPS))
    return min((cap for cap in found if cap is not None), key=lambda cap: cap.variance)


def _cap(dimension: int, epsilon: float, share: float) -> Cap | None:
    half = (dimension - 1) / 2
    # (1 + <v, u>) / 2 of an even draw v is Beta(half, half).
    gamma = 1 - 2 * float(special.betaincinv(half, half, share))
    if not 0 <= gamma < 1:
        return None
    q = float(special.betainc(half, half, (1 - gamma) / 2))
    log_odds = epsilon + math.log(q) - math.log1p(-q)
    # Rounded down: what is left, 1 - p, may be no smaller than it should, and its digits are few where p is near 1.
    p = 1 / (1 + math.exp(-log_odds)) * (1 - 2.0**-51)
    if not 0 < q <= 0.5 or p >= 1:
        return None
    # The integral of t over the cap, by the density (1 - t^2)^(half - 1) / B(1/2, half).
    log_moment = half * math.log1p(-(gamma**2)) - math.log(2 * half) - float(special.betaln(0.5, half))
    mean = math.exp(log_moment) * (p / q - (1 - p) / (1 - q))
    return Cap(dimension, gamma, q, p, mean) if mean > 0 else None


def draw_direction(vectors: Tensor, epsilon: float, stream: NoiseStream) -> Tensor:
    """Unbiased estimates of the directions of vectors, [B, d] to float64 [B, d], each at ``epsilon``; of norm 1 / `Cap.mean`.

    A vector of norm 0 has no direction, and the first axis stands for it. Sides are chosen by 53 bits and points computed in
    float64: the bound is that of real numbers, up to their rounding.

    Raises ValueError as `best_cap`, and for vectors that are not finite.
    """
    flat = vectors.detach().double().cpu()
    cap = best_cap(flat.shape[1], float(epsilon))
    if not bool(torch.isfinite(flat).all()):
        raise ValueError("a vector to be released holds a NaN or an infinity")
    flat = flat / flat.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    norms = flat.norm(dim=1, keepdim=True)
    first = torch.nn.functional.one_hot(torch.zeros(len(flat), dtype=torch.int64), flat.shape[1]).double()
    unit = torch.where(norms > 0, flat / norms.clamp_min(1e-300), first)
    u = uniforms(chacha_words(stream.take(), 0, max(len(flat), 1))[: len(flat), :4])
    half = (cap.dimension - 1) / 2
    inside = u[:, 0] <= cap.probability
    # The lower tail of the Beta law holds the cap, mirrored, so that a small share keeps its digits.
    tail = np.where(inside, u[:, 1] * cap.share, cap.share + u[:, 1] * (1 - cap.share))
    along = torch.from_numpy(1 - 2 * special.betaincinv(half, half, tail)).unsqueeze(1).clamp(-1, 1)
    normals = standard_normals(stream.take(), flat.numel()).double().reshape(flat.shape)
    across = normals - (normals * unit).sum(1, keepdim=True) * unit
    across = across / across.norm(dim=1, keepdim=True)
    return (along * unit + (1 - along.square()).clamp_min(0).sqrt() * across) / cap.mean
