"""PGM-EST: the magnitudes behind several noisy observations, by maximum likelihood (Algorithm 5, Lemmas 4 to 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdp.validate import rate


def estimate_magnitudes(
    observed: Any, sensitivities: Sequence[float], selection_rate: float, iterations: int = 1000
) -> np.ndarray:
    """Estimated magnitudes v of all partitions, float64 ``[partitions]`` (PGM-EST, Algorithm 5).

    Observation t of partition i is lambda_t v_i plus noise proportional to Delta_t. Lemma 5 (v for given lambda) and
    Lemma 4 (lambda for given v) take turns. Only products lambda v are observed; lambda_1 = q_ps anchors the scale.
    Every lambda starts at q_ps: from 1, as printed, the same maximum takes more iterations.

    Args:
        observed: noisy magnitudes, ``[observations, partitions]``; NaN where a partition was chosen before.
        sensitivities: Delta_t of each observation, positive.
        selection_rate: q_ps, in (0, 1].
        iterations: J, how often the two lemmas take turns.

    One observation gives it over q_ps (section 4.5; the pseudocode forgets the division). Raises ValueError for shapes
    that do not fit, a partition never observed, and values out of range.
    """
    values, weights = _check(observed, sensitivities, selection_rate)
    if len(values) == 1:
        return values[0] / selection_rate
    attenuation = np.full(len(values), float(selection_rate))
    estimate = _lemma_5(values, weights, attenuation)
    for _ in range(iterations - 1):
        attenuation = _lemma_4(values, weights, estimate, attenuation)
        estimate = _lemma_5(values, weights, attenuation)
    return estimate


def attenuations(
    observed: Any, sensitivities: Sequence[float], selection_rate: float, estimate: np.ndarray
) -> np.ndarray:
    """lambda_1 = q_ps and lambda_t for the other observations, by Lemma 4 from estimated magnitudes."""
    values, weights = _check(observed, sensitivities, selection_rate)
    return _lemma_4(values, weights, estimate, np.full(len(values), float(selection_rate)))


def estimation_std(noise_multiplier: float, sensitivities: Sequence[float], attenuation: np.ndarray) -> float:
    """Standard deviation of an estimate that every observation took part in (Lemma 6).

    Exact where lambda is known. With estimated ones it is low, by 4% on average and 15% at most.
    """
    return noise_multiplier / math.sqrt(sum((lam / d) ** 2 for lam, d in zip(attenuation, sensitivities)))


def _check(observed: Any, sensitivities: Sequence[float], selection_rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Observations with 0 for those not made, and their weights 1 / Delta_t^2 with 0 likewise."""
    values = np.asarray(observed, dtype=float)
    deltas = np.asarray(sensitivities, dtype=float)
    if values.ndim != 2 or deltas.shape != values.shape[:1] or not len(values):
        raise ValueError(
            f"observations of shape {values.shape} do not go with {deltas.shape} sensitivities: give [observations, partitions]"
        )
    rate(selection_rate=selection_rate)
    seen = ~np.isnan(values)
    if not seen.any(0).all():
        raise ValueError("a partition was never observed: the first observation covers all of them")
    return np.where(seen, values, 0.0), seen / deltas[:, None] ** 2


def _lemma_5(values: np.ndarray, weights: np.ndarray, attenuation: np.ndarray) -> np.ndarray:
    lam = attenuation[:, None]
    return (weights * values * lam).sum(0) / (weights * lam**2).sum(0)


def _lemma_4(values: np.ndarray, weights: np.ndarray, estimate: np.ndarray, before: np.ndarray) -> np.ndarray:
    """lambda of every observation but the first; one whose partitions are all estimated at 0 keeps its own."""
    seen = weights > 0
    squares = (seen * estimate**2).sum(1)
    found = np.divide((seen * values * estimate).sum(1), squares, out=before.copy(), where=squares > 0)
    found[0] = before[0]
    return found
