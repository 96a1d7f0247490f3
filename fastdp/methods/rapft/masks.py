"""From relevance to a mask: min-max a layer, ranking, threshold (equations 18 and 19, lines 3 to 9 of algorithm 1)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping

import torch

from fastdp.validate import number


def check_irrelevance_ratio(irrelevance_ratio: float) -> float:
    """beta as a float. Raises ValueError outside (.5, 1]: the weak block must be the larger one."""
    number(irrelevance_ratio=irrelevance_ratio)
    if irrelevance_ratio is None or not 0.5 < irrelevance_ratio <= 1:
        raise ValueError(
            f"irrelevance_ratio is {irrelevance_ratio!r}: it must be above .5 and at most 1, so that most coordinates are weak"
        )
    return float(irrelevance_ratio)


def normalised(relevance: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Relevance of each layer (a trained parameter) moved to [0, 1] by its own minimum and maximum.

    A layer whose values are all equal, for which that is 0/0, becomes 0.
    """
    ranges = {name: (float(values.min()), float(values.max())) for name, values in relevance.items()}
    for name, (low, high) in ranges.items():
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"the relevance of {name} is not finite; raise the epsilon of the propagation rule")
    tied = [name for name, (low, high) in ranges.items() if low == high]
    if len(tied) == len(ranges):
        what = "0" if all(ranges[name] == (0.0, 0.0) for name in tied) else "tied within each layer"
        raise ValueError(
            f"every relevance is {what}, as of parameters that start at zero. Set map_after to some private "
            "steps, or train some steps on public data first."
        )
    if tied:
        warnings.warn(
            f"all relevances of {tied[0]}{' and others' if len(tied) > 1 else ''} are equal: its coordinates are told "
            "apart by position alone",
            stacklevel=3,
        )
    return {
        name: (values - ranges[name][0]) / ((ranges[name][1] - ranges[name][0]) or 1.0)
        for name, values in relevance.items()
    }


def weak_masks(relevance: Mapping[str, torch.Tensor], irrelevance_ratio: float) -> dict[str, torch.Tensor]:
    """True where a coordinate is weak: among the ceil(beta n) least relevant ones of its layer (section V-C).

    Equal relevances are ranked by position, so that a block's size never depends on the data; the printed "<= threshold"
    would call all of them weak, and all of the map where they are many.

    Relevance is min-max normalised here.
    """
    ratio = check_irrelevance_ratio(irrelevance_ratio)
    masks = {name: _least_relevant(values, ratio) for name, values in normalised(relevance).items()}
    check_strong((mask.numel() for mask in masks.values()), ratio)
    return masks


def check_strong(sizes: Iterable[int], irrelevance_ratio: float) -> None:
    """Raise ValueError if no coordinate of parameters of these sizes would be strong (r_s = 0), whatever the data."""
    if all(_weak_count(size, irrelevance_ratio) == size for size in sizes):
        raise ValueError(
            f"at irrelevance ratio {irrelevance_ratio:g} every coordinate is weak and none is strong (r_s = 0): lower the "
            "ratio"
        )


def _weak_count(size: int, ratio: float) -> int:
    """How many of ``size`` coordinates are weak."""
    # 1e-9 keeps a product such as .7 * 10 = 7.000000000000001 from being rounded up.
    return min(math.ceil(ratio * size - 1e-9), size)


def _least_relevant(values: torch.Tensor, ratio: float) -> torch.Tensor:
    flat = values.reshape(-1)
    mask = torch.zeros(flat.numel(), dtype=torch.bool, device=flat.device)
    mask[torch.argsort(flat, stable=True)[: _weak_count(flat.numel(), ratio)]] = True
    return mask.view(values.shape)
