"""The noise of EW-FT's releases, epoch by epoch, with what each schedule really guarantees.

A record is one user's clipped sequence. Two of norm at most C differ by up to 2 C. The server sees who sends which, so the
guarantee is that of Gaussian releases of sensitivity 2 C without sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import fastdp.accounting as accounting
from fastdp.accounting.event_types import DpEvent
from fastdp.validate import one_of

#: Std of the noise for a multiplier sigma: what sensitivity 2 C calls for, or the paper's literal "standard deviation".
Scale = Literal["2C", "C"]

_AMPLIFICATION = (
    "the printed epsilon {epsilon:g} counts every batch as a secret Poisson sample, but the server sees whose sequence it "
    "gets in every epoch: the event on this card, without sampling, is what was really released"
)
_LITERAL = "the noise has standard deviation C sigma, half of what the sensitivity 2 C of clipped sequences calls for"


@dataclass(frozen=True)
class NoiseSchedule:
    """Noise of the releases of one record.

    Attributes:
        name: of the schedule, for the card.
        ratios: noise standard deviation over the clipping norm C, one an epoch; a single one where ``reuse``.
        reuse: release each record once, and use that release in every epoch.
        target_epsilon: what the schedule was made for; in `paper` forms not what it guarantees.
        delta: of that epsilon.
        flaws: why the schedule's epsilon does not hold; empty for the sound ones.
        settings: how it was made, for the card.
    """

    name: str
    ratios: tuple[float, ...]
    delta: float
    target_epsilon: float | None = None
    reuse: bool = False
    flaws: tuple[str, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not self.ratios or not all(ratio >= 0 and math.isfinite(ratio) for ratio in self.ratios):
            raise ValueError("a noise schedule needs a finite noise of at least 0 for each of its epochs")
        if self.reuse and len(self.ratios) != 1:
            raise ValueError("a schedule that releases once has one noise level, not one an epoch")

    @property
    def epochs(self) -> int | None:
        """Epochs it lasts for; None where a release is reused, which lasts for any number."""
        return None if self.reuse else len(self.ratios)

    def event(self) -> DpEvent:
        """Event of all its releases of one record, for replace-one adjacency: sensitivity 2 C."""
        return accounting.compose(*map(accounting.gaussian, self.ratios))

    def epsilon(self, delta: float | None = None) -> float:
        """What all its releases really cost, an upper bound; inf without noise."""
        if 0.0 in self.ratios:
            return math.inf
        return accounting.epsilon(self.event(), self.delta if delta is None else delta, adjacency="replace_one")


def release_once(epsilon: float, delta: float) -> NoiseSchedule:
    """One release of each record, reused in every epoch: the least noise for a guarantee, and the recommended form."""
    (multiplier,) = accounting.sound_schedule(1, epsilon, delta)
    return NoiseSchedule("release once", (2 * multiplier,), delta, epsilon, reuse=True)


def dp_forward(epochs: int, epsilon: float, delta: float) -> NoiseSchedule:
    """DP-Forward's analytic (matrix) Gaussian mechanism: a fresh release in every epoch, all at the same noise.

    Together they cost ``epsilon``: i.i.d. noise of the least std for sensitivity 2 C.

    A matrix Gaussian shaped by row and column factors U, V costs what the whitened difference ``U^-1 D V^-T`` does; a
    clip of the Frobenius norm prefers no direction, so multiples of the identity are best (Du et al., CCS 2023).
    """
    ratios = [2 * z for z in accounting.sound_schedule(epochs, epsilon, delta)]
    return NoiseSchedule("DP-Forward", tuple(ratios), delta, epsilon)


def paper(multipliers: Sequence[float], epsilon: float, delta: float, scale: Scale = "2C") -> NoiseSchedule:
    """The paper's noise for multipliers sigma_i, with std ``2 C sigma`` or, to the letter, ``C sigma``; flawed."""
    one_of(("2C", "C"), scale=scale)
    factor = 2.0 if scale == "2C" else 1.0
    flaws = (_AMPLIFICATION.format(epsilon=epsilon),) + ((_LITERAL,) if scale == "C" else ())
    ratios = tuple(factor * float(sigma) for sigma in multipliers)
    settings = (("scale", scale), ("multipliers", tuple(map(float, multipliers))))
    return NoiseSchedule("EWPBA as printed", ratios, delta, epsilon, flaws=flaws, settings=settings)


def paper_epoch_weighted(
    dataset_size: int,
    batch_size: int,
    epochs: int,
    epsilon: float,
    delta: float,
    step_distance: float = 2.0,
    scale: Scale = "2C",
) -> NoiseSchedule:
    """EW-FT as printed: Algorithm 1. Its epsilon does not hold; see `NoiseSchedule.epsilon`."""
    sigmas = accounting.epoch_weighted_schedule(dataset_size, batch_size, epochs, epsilon, delta, step_distance)
    return paper(sigmas, epsilon, delta, scale)
