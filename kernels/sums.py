"""The family ``sums`` on GPUs: what each op launches, with the op's own arguments."""

from collections.abc import Sequence

import torch

from fastdp.ops.bounds import MOST_UNITS
from fastdp.ops.heads import widens
from fastdp.ops.routes import NARROW

from . import affine, grouped, onehot, weighted
from .launch import assert_ids, cached_with, serves, to_device_of


@serves(2)
def per_unit(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The gradient of each unit, float32 [B, m, n]: for a wide matrix one product a unit, if ``offsets`` are on the host."""
    units, tokens, sides = offsets.shape[0] - 1, right.shape[0], (left.shape[1], right.shape[1])
    if min(sides) <= NARROW or (units > 1 and offsets.device.type != "cpu"):
        return grouped.per_unit_group([left], [right], offsets)[0][0]
    bounds, widened = offsets.tolist() if units > 1 else [0, tokens], widens(left, right)
    if widened and tokens and bounds == [tokens // units * unit for unit in range(units + 1)]:
        pair = left.unflatten(0, (units, -1)).mT, right.unflatten(0, (units, -1))
        return torch.bmm(*pair, out_dtype=torch.float32)
    gradients = torch.zeros(units, *sides, dtype=torch.float32, device=right.device)
    every = torch.ones(1, 1, dtype=torch.float32, device=right.device)
    for gradient, start, end in zip(gradients, bounds, bounds[1:]):
        one, two = left[start:end], right[start:end]
        if widened and end > start:
            torch.mm(one.T, two, out_dtype=torch.float32, out=gradient)
        elif end > start:
            own = offsets if units == 1 else torch.tensor([0, end - start])
            weighted.weighted_sums_([gradient], [one], [two], every, own, [False])
    return gradients


@serves(2)
def per_unit_group(
    lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor], offsets: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gradients and squared norms of k matrices, in one launch for all of the same dtypes."""
    return grouped.per_unit_group(lefts, rights, offsets)


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
        return
    if offsets is None:
        offsets = torch.arange(right.shape[0] + 1, device=right.device)
    if mask is None or weights_unmasked is None:
        weighted_sum_group_([out], [left], [right], weights.unsqueeze(0), offsets, [True])
        return
    sums = [torch.empty(out.shape, dtype=torch.float32, device=out.device) for _ in range(2)]
    both = torch.stack([weights, weights_unmasked])
    weighted_sum_group_(sums, [left] * 2, [right] * 2, both, offsets, [False] * 2)
    out.add_(sums[0].where(mask, sums[1]))


@serves(3)
def weighted_sum_group_(
    outs: Sequence[torch.Tensor],
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    weights: torch.Tensor,
    offsets: torch.Tensor,
    begun: Sequence[bool],
) -> None:
    """The weighted sums of k matrices, one launch for all of the same dtypes and alignment; see `weighted.weighted_sums_`.

    More than `MOST_UNITS` units take several launches, so that the roundings of a unit's sum do not depend on their number.
    """
    units, offsets = weights.shape[1], to_device_of(offsets, weights)
    if units <= MOST_UNITS:
        weighted.weighted_sums_(outs, lefts, rights, weights, offsets, begun)
        return
    for first in range(0, units, MOST_UNITS):
        last = min(units, first + MOST_UNITS)
        own = cached_with(offsets, ("units", first), offsets[first : last + 1].clone)
        weighted.weighted_sums_(outs, lefts, rights, weights[:, first:last], own, begun)
        begun = [True] * len(outs)
