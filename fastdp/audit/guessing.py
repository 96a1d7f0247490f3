"""From scores of canaries to guesses, and from guesses to the verdict of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastdp.audit.bound import lower_bound

#: Shares of the canaries that are guessed about: few and sure for weak faults, many for strong ones.
SHARES = (0.02, 0.1, 0.4)


@dataclass(frozen=True)
class Guess:
    """One choice of how many canaries to guess about, and what it showed at its part of the confidence.

    Attributes:
        guesses, correct, epsilon: how many there were, how many were right, and the lower bound that follows.
    """

    guesses: int
    correct: int
    epsilon: float


@dataclass(frozen=True)
class AuditResult:
    """What an audit showed.

    Attributes:
        epsilon: empirical lower bound at ``delta``: with probability ``confidence`` over the audit, the run's true epsilon
            is at least this.
        delta: at which both epsilons are stated.
        confidence: of all trials together.
        claimed: the upper bound that the run states at the same delta.
        canaries: how many were included by a coin.
        trials: each number of guesses that was tried; the best one gives ``epsilon``.
    """

    epsilon: float
    delta: float
    confidence: float
    claimed: float
    canaries: int
    trials: tuple[Guess, ...]

    @property
    def refuted(self) -> bool:
        """Whether the claim is false, at the stated confidence. False is no proof that it holds."""
        return self.epsilon > self.claimed

    def __str__(self) -> str:
        verdict = "REFUTED" if self.refuted else "not refuted"
        return (
            f"epsilon >= {self.epsilon:.3f} at delta {self.delta:g} ({self.confidence:.6g} confidence, {self.canaries} "
            f"canaries); claimed {self.claimed:.3f}: {verdict}"
        )


def conclude(
    scores: torch.Tensor,
    included: torch.Tensor,
    *,
    claimed: float,
    delta: float,
    confidence: float = 0.95,
    shares: Sequence[float] = SHARES,
) -> AuditResult:
    """Guess that the canaries with the highest scores were included and those with the lowest were not, and count.

    Several shares divide the risk of a false alarm equally among them (union bound), so the confidence holds for the best.

    Args:
        scores: float [m], higher for what looks included.
        included: bool [m], the coins.
        claimed: the epsilon that is put to the test, at ``delta``.
        delta: in [0, 1].
        confidence: in (0, 1); 1 - confidence bounds the probability that a true claim is refuted.
        shares: shares of the canaries guessed about, in (0, 1], half at each end of the order.

    Raises ValueError for shapes that differ, a score that is no number, or a share outside (0, 1].

    >>> import torch
    >>> from fastdp.audit import conclude
    >>> print(conclude(torch.arange(100.0), torch.arange(100) >= 50, claimed=0.5, delta=1e-5))  # all guesses right
    epsilon >= 2.223 at delta 1e-05 (0.95 confidence, 100 canaries); claimed 0.500: REFUTED
    """
    if scores.dim() != 1 or scores.shape != included.shape:
        raise ValueError(f"scores have shape {list(scores.shape)} and coins {list(included.shape)}: both must be [m]")
    if included.dtype != torch.bool:
        raise ValueError(f"the coins are {included.dtype}: they must be bool")
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("a canary's score is not finite: the run diverged, and its scores rank nothing")
    if not shares or any(not 0 < share <= 1 for share in shares):
        raise ValueError(f"shares are {tuple(shares)}: each must lie in (0, 1]")
    count = scores.shape[0]
    coins = included[scores.argsort(stable=True)].cpu()
    each = 1 - (1 - confidence) / len(shares)
    trials = []
    for share in shares:
        half = min(max(1, int(count * share) // 2), count // 2)
        correct = int(coins[count - half :].sum()) + int((~coins[:half]).sum())
        trials.append(Guess(2 * half, correct, lower_bound(count, 2 * half, correct, delta, each)))
    best = max(trial.epsilon for trial in trials)
    return AuditResult(best, delta, confidence, claimed, canaries=count, trials=tuple(trials))
