"""The family ``sums`` on GPUs: what each op launches, with the op's own arguments."""

from collections.abc import Sequence

import torch

from fastdp.ops.routes import NARROW

from . import affine, grouped, onehot, weighted
from .launch import assert_ids, serves, to_device_of

#: Whether torch multiplies 16-bit matrices into float32 (from 2.8 on, on a GPU).
_WIDENS = "dtype" in torch.ops.aten.mm.overloads()


@serves(2)
def per_unit(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The gradient of each unit, float32 [B, m, n]; that of a single unit is one product."""
    if offsets.shape[0] > 2 or min(left.shape[1], right.shape[1]) <= NARROW:
        return grouped.per_unit_group([left], [right], offsets)[0][0]
    if _WIDENS and left.dtype == right.dtype != torch.float32 and left.device.type != "cpu":
        return torch.mm(left.T, right, out_dtype=torch.float32).unsqueeze(0)
    gradient = torch.empty(1, left.shape[1], right.shape[1], dtype=torch.float32, device=right.device)
    every = torch.ones(1, 1, dtype=torch.float32, device=right.device)
    weighted.weighted_sums_([gradient[0]], [left], [right], every, offsets, [False])
    return gradient


@serves(2)
def per_unit_group(
    lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor], offsets: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gradients and squared norms of k matrices, in one launch for all of the same dtypes."""
    return grouped.per_unit_group(lefts, rights, offsets)


@serves(1)
def column_sums(left: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sums of each unit's rows, float32 [B, m]: its gradient against inputs of 1."""
    ones = left.new_ones(1, 1).expand(left.shape[0], 1)
    return grouped.per_unit_group([left], [ones], offsets)[0][0].squeeze(2)


affine_sums_group = serves(4)(affine.affine_sums_group)


@serves(3)
def weighted_sum_(
    out: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    weights: torch.Tensor,
    weights_unmasked: torch.Tensor | None,
    mask: torch.Tensor | None,
    offsets: torch.Tensor | None,
) -> None:
    """The weighted sum of all tokens' gradients added to ``out``; where ``mask`` is False, by ``weights_unmasked``."""
    if left.dim() == 1:
        assert_ids(left, out.shape[0])
        if offsets is not None:
            units = onehot.units_of_tokens(to_device_of(offsets, right), left.shape[0])
            weights = weights.index_select(0, units)
            weights_unmasked = None if weights_unmasked is None else weights_unmasked.index_select(0, units)
        onehot.onehot_weighted_sum_(out, left, right, weights, weights_unmasked, mask)
    else:
        weighted.weighted_sum_(out, left, right, weights, weights_unmasked, mask, offsets)


@serves(3)
def weighted_sum_group_(
    outs: Sequence[torch.Tensor],
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    weights: torch.Tensor,
    offsets: torch.Tensor,
    begun: Sequence[bool],
) -> None:
    """The weighted sums of k matrices, one launch for all of the same dtypes and alignment; see `weighted.weighted_sums_`."""
    weighted.weighted_sums_(outs, lefts, rights, weights, offsets, begun)
