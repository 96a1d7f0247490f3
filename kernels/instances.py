"""Norms and weighted sums of per-unit gradients that lie in memory, those of many parameters in one launch."""

from collections.abc import Sequence

import torch

from . import groups
from .launch import serves


def _grouped(instances: Sequence[torch.Tensor]) -> bool:
    return {x.dtype for x in instances} == {torch.float32} and all(map(torch.Tensor.is_contiguous, instances))


@serves(1)
def instance_norms_group(instances: Sequence[torch.Tensor]) -> torch.Tensor:
    """Squared norms [k, B] of k tensors [B, ...], in two launches."""
    return groups.instance_norms(instances) if _grouped(instances) else NotImplemented


@serves(1)
def instance_sum_group(instances: Sequence[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    """Weighted sums over the units of k tensors [B, ...], weights [k, B]: one launch."""
    return groups.instance_sums(instances, weights) if _grouped(instances) else NotImplemented
