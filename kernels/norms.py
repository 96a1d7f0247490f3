"""The family ``norms`` on GPUs: what each op launches, with the op's own arguments."""

import torch

from . import cross, direct, onehot
from .launch import assert_ids, serves


@serves(2)
def norms(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, measure: int, mask: torch.Tensor | None
) -> torch.Tensor:
    """Norms [1, B] of ``measure``, or [2, B] inside and outside ``mask``; without asking the device for lengths."""
    if left.dim() == 1:
        if mask is not None:
            assert_ids(left, mask.shape[0])
        return onehot.onehot_norms(left, right, offsets, measure, mask)
    return direct.direct_norms(left, right, offsets, measure, mask)


@serves(4)
def cross_inner(
    left1: torch.Tensor,
    right1: torch.Tensor,
    left2: torch.Tensor,
    right2: torch.Tensor,
    offsets1: torch.Tensor,
    offsets2: torch.Tensor,
) -> torch.Tensor:
    """Inner products [B] of two uses."""
    for ids, other in ((left1, left2), (left2, left1)):
        if ids.dim() == 1 and other.dim() == 2:
            assert_ids(ids, other.shape[1])
    return cross.cross_inner(left1, right1, left2, right2, offsets1, offsets2)
