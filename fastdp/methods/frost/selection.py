"""PSEL: partitions chosen little by little from noisy magnitudes of those that remain (Algorithm 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fastdp.methods.frost.estimate import attenuations, estimate_magnitudes, estimation_std
from fastdp.methods.frost.partitions import Partition
from fastdp.validate import rate

#: From the iteration, counted from 1, and the indices that remain, to their noisy magnitudes and the sensitivity.
Observe = Callable[[int, Sequence[int]], tuple[np.ndarray, float]]


@dataclass(frozen=True)
class PartitionChoice:
    """What PSEL chose. All of it is computed from released magnitudes."""

    #: The iteration that chose each partition, from 1; 0 if it stays frozen. int64 ``[partitions]``.
    iteration: np.ndarray
    #: The noisy magnitudes, NaN where a partition was chosen before. float64 ``[steps, partitions]``.
    observed: np.ndarray


def check_unfreezing_ratio(partitions: Sequence[Partition], unfreezing_ratio: float) -> None:
    """Raise ValueError unless gamma lies in (0, 1] and lets at least one partition be trained."""
    rate(unfreezing_ratio=unfreezing_ratio)
    total = sum(partition.size for partition in partitions)
    smallest = min(partitions, key=lambda partition: partition.size)
    if smallest.size > unfreezing_ratio * total:
        raise ValueError(
            f"unfreezing_ratio {unfreezing_ratio:g} leaves {int(unfreezing_ratio * total):,} of {total:,} parameters, "
            f"and the smallest partition, {smallest.name}, has {smallest.size:,}: raise the ratio, or split further"
        )


def select_partitions(
    observe: Observe,
    partitions: Sequence[Partition],
    *,
    steps: int,
    unfreezing_ratio: float,
    gap_coefficient: float,
    noise_multiplier: float,
    selection_rate: float,
    estimation_iterations: int = 1000,
) -> PartitionChoice:
    """Choose partitions of at most ``unfreezing_ratio`` of all parameters in ``steps`` iterations (PSEL, Algorithm 4).

    Iteration t takes partitions up to t / T of the limit, and the last one fills it. Until then an estimate must exceed those
    of all partitions expected to stay frozen by ``gap_coefficient`` standard deviations. A partition that does not fit is
    skipped. The printed inner loop never ends at one below the threshold; here it stops.

    ``observe`` releases the noisy magnitudes of the partitions that remain, at ``noise_multiplier`` sigma_ps. In the paper the
    others are T, gamma, nu, q_ps, and J of PGM-EST.
    """
    check_unfreezing_ratio(partitions, unfreezing_ratio)
    sizes = np.array([partition.size for partition in partitions], dtype=np.int64)
    limit = unfreezing_ratio * float(sizes.sum())
    chosen = np.zeros(len(sizes), dtype=np.int64)
    observed = np.full((steps, len(sizes)), np.nan)
    sensitivities: list[float] = []
    for t in range(1, steps + 1):
        remaining = np.flatnonzero(chosen == 0)
        observed[t - 1, remaining], sensitivity = observe(t, remaining.tolist())
        sensitivities.append(sensitivity)
        estimate = estimate_magnitudes(observed[:t], sensitivities, selection_rate, estimation_iterations)
        falling = remaining[np.argsort(-estimate[remaining], kind="stable")]
        least = -np.inf
        if t < steps:
            attenuation = attenuations(observed[:t], sensitivities, selection_rate, estimate)
            least = _threshold(estimate, sizes, falling, float(sizes.sum()) - limit)
            least += gap_coefficient * estimation_std(noise_multiplier, sensitivities, attenuation)
        _take(chosen, t, falling[estimate[falling] > least], sizes, t * limit / steps)
    return PartitionChoice(chosen, observed)


def _threshold(estimate: np.ndarray, sizes: np.ndarray, falling: np.ndarray, frozen: float) -> float:
    """mu_thres: the largest estimate among the partitions that stay frozen if ``frozen`` parameters must (lines 13-18)."""
    rising = falling[::-1]
    cumulative = np.cumsum(sizes[rising])
    return float(estimate[rising[min(int(np.searchsorted(cumulative, frozen, side="right")), len(rising) - 1)]])


def _take(chosen: np.ndarray, t: int, candidates: np.ndarray, sizes: np.ndarray, limit: float) -> None:
    """Choose candidates in their order, each that still fits under ``limit`` parameters in all."""
    taken = int(sizes[chosen > 0].sum())
    for index in candidates:
        if taken + sizes[index] <= limit:
            chosen[index] = t
            taken += int(sizes[index])


def fill(scores: Sequence[float], partitions: Sequence[Partition], unfreezing_ratio: float) -> np.ndarray:
    """Choose the partitions with the largest scores that fit under the limit: 1 for those, else 0, ``[partitions]``."""
    check_unfreezing_ratio(partitions, unfreezing_ratio)
    sizes = np.array([partition.size for partition in partitions], dtype=np.int64)
    chosen = np.zeros(len(sizes), dtype=np.int64)
    _take(chosen, 1, np.argsort(-np.asarray(scores), kind="stable"), sizes, unfreezing_ratio * float(sizes.sum()))
    return chosen
