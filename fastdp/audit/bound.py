"""A lower bound on epsilon from how many canaries of one run were guessed right.

T. Steinke, M. Nasr, M. Jagielski, "Privacy auditing with one (1) training run", NeurIPS 2023 (arXiv 2305.08846).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import expit
from scipy.stats import binom

from fastdp.validate import fraction

#: Bisection ends when epsilon is known to this.
_RESOLUTION = 1e-6
#: No count of guesses that fits in memory supports a bound as large as this.
_LARGEST = 60.0


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float = 0.0) -> float:
    """Probability bound that an (epsilon, delta)-DP run lets ``correct`` or more of ``guesses`` be right (Theorem 3.1).

    Each of m canaries was included with probability 1/2, and r of them were guessed about. With W binomial with r trials
    of success probability e^epsilon / (1 + e^epsilon), and v right guesses,

        beta + m delta alpha,  beta = Pr[W >= v],  alpha = max over 1 <= i <= m of 2/i Pr[v > W >= v - i].

    Args:
        canaries: m, all that were included by a coin, those not guessed about among them.
        guesses, correct: r, at most m; and v, at most r.
        epsilon, delta: the claim to be refuted.

    Raises ValueError for a count or parameter outside these ranges.

    >>> from fastdp.audit import p_value
    >>> round(p_value(canaries=100, guesses=20, correct=19, epsilon=1.0), 3)  # luck that one run in sixty has
    0.016
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"{correct} right of {guesses} guesses about {canaries} canaries: the counts must satisfy "
            "0 <= correct <= guesses <= canaries"
        )
    if not epsilon >= 0:
        raise ValueError(f"epsilon is {epsilon}: it must be at least 0")
    if not 0 <= delta <= 1:
        raise ValueError(f"delta is {delta}: it must lie between 0 and 1")
    accuracy = float(expit(epsilon))
    beta = float(binom.sf(correct - 1, guesses, accuracy))
    if delta == 0 or correct == 0:
        return min(1.0, beta)
    # Below v - i for i > v there is no probability left, so i up to v is enough.
    below = binom.pmf(np.arange(correct - 1, -1, -1), guesses, accuracy)
    alpha = 2 * float(np.max(np.cumsum(below) / np.arange(1, correct + 1)))
    return min(1.0, beta + canaries * delta * alpha)


def lower_bound(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that these guesses refute, or 0: a run with a smaller one does so well with p <= 1 - confidence.

    Args:
        canaries, guesses, correct, delta: as in `p_value`.
        confidence: in (0, 1); the bound exceeds the true epsilon in at most a share 1 - confidence of audits.

    Raises ValueError as `p_value`, and for a confidence outside (0, 1).

    >>> from fastdp.audit import lower_bound
    >>> round(lower_bound(canaries=100, guesses=20, correct=19, delta=1e-5), 2)
    1.29
    """
    fraction(confidence=confidence)
    level = 1 - confidence
    if p_value(canaries, guesses, correct, 0.0, delta) > level:
        return 0.0
    low, high = 0.0, _LARGEST
    while high - low > _RESOLUTION:
        middle = (low + high) / 2
        if p_value(canaries, guesses, correct, middle, delta) <= level:
            low = middle
        else:
            high = middle
    return low


def best_possible(canaries: int, guesses: int, delta: float, confidence: float = 0.95) -> float:
    """The bound if every guess is right: what an audit of this size can show at most.

    Args:
        canaries, guesses, delta, confidence: as in `lower_bound`. Raises ValueError as that.

    >>> from fastdp.audit import best_possible
    >>> round(best_possible(canaries=100, guesses=20, delta=1e-5), 2)
    1.82
    """
    return lower_bound(canaries, guesses, guesses, delta, confidence)


def guesses_needed(epsilon: float, confidence: float = 0.95) -> int:
    """How many guesses, all right, refute ``epsilon``: the smallest r with (e^epsilon / (1 + e^epsilon))^r <= 1 - confidence.

    Args:
        epsilon: the claim to be refuted, at a delta of 0. Raises ValueError if it is negative or infinite.
        confidence: as in `lower_bound`.

    >>> from fastdp.audit import guesses_needed
    >>> [guesses_needed(epsilon) for epsilon in (1.0, 3.0, 8.0)]
    [10, 62, 8932]
    """
    if not (epsilon >= 0 and math.isfinite(epsilon)):
        raise ValueError(f"epsilon is {epsilon}: it must be at least 0 and finite")
    fraction(confidence=confidence)
    return math.ceil(math.log1p(-confidence) / -math.log1p(math.exp(-epsilon)))
