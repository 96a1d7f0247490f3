"""Soft freezing: what the released magnitudes say of each partition is a scale for it rather than a verdict.

An example's gradient is clipped, and noise added, in units s_P of each partition, at the same noise multiplier. For a
given loss to clipping the noise is least where s_P^2 is as the root mean square of the partition's gradient entries:
with a power of one half. A power of 0 is DP-SGD on everything, and the larger the power, the more is left to the
partitions of the largest magnitudes, as by freezing the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fastdp.engine.clip.axes import RankOne
from fastdp.methods.frost.estimate import attenuations, estimate_magnitudes
from fastdp.methods.frost.partitions import Partition
from fastdp.methods.frost.selection import Selected


def known_magnitudes(
    selected: Selected, noise_multiplier: float, selection_rate: float, estimation_iterations: int
) -> np.ndarray:
    """Estimated magnitudes, and the deviation of an estimate for those that are less: noise hides how much less.

    Float64 ``[partitions]``, positive but where nothing at all was observed. Computed from released magnitudes alone.

    Args:
        selected: the released magnitudes.
        noise_multiplier: sigma_ps of each release.
        selection_rate: q_ps.
        estimation_iterations: J of PGM-EST.
    """
    observed, sensitivities = selected.observed, selected.sensitivities
    estimate = estimate_magnitudes(observed, sensitivities, selection_rate, estimation_iterations)
    attenuation = attenuations(observed, sensitivities, selection_rate, estimate)
    parts = (~np.isnan(observed) * (attenuation / np.asarray(sensitivities))[:, None] ** 2).sum(0)
    return np.maximum(estimate, noise_multiplier / np.sqrt(parts))


def soft_scales(partitions: Sequence[Partition], magnitudes: Sequence[float], power: float) -> dict[str, float]:
    """s_P by parameter, as the power of its partition's magnitude; over all entries the mean of s^2 is 1.

    So evenly distributed noise stays as it was. Partitions of magnitude 0 count as the least that is above it; if all are 0,
    every scale is 1.
    """
    sizes = np.array([partition.size for partition in partitions], dtype=float)
    known = np.asarray(magnitudes, dtype=float)
    least = known[known > 0].min(initial=np.inf)
    raw = np.maximum(known, least) ** power if np.isfinite(least) else np.ones(len(sizes))
    scales = raw / np.sqrt((sizes * raw**2).sum() / sizes.sum())
    return {name: float(scale) for partition, scale in zip(partitions, scales) for name in partition.parameters}


def even_axes(scales: Mapping[str, float], parameters: Mapping[str, torch.Tensor]) -> dict[str, RankOne]:
    """One scale for all entries of each parameter."""
    found = {}
    for name, parameter in parameters.items():
        rows = parameter.shape[0] if parameter.dim() else 1
        columns = torch.ones(parameter.numel() // max(rows, 1), device=parameter.device)
        found[name] = RankOne(torch.full((rows,), scales[name], device=parameter.device), columns)
    return found
