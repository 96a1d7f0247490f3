"""Sums, means and maxima over bags of a table's rows: `nn.EmbeddingBag`, as a lookup and what follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fastdp.engine.uses.reads import Reads
from fastdp.engine.uses.use import CaptureContext, EmbeddingUse


def _bag(values: torch.Tensor, offsets: torch.Tensor, include_last_offset: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat values ``[N]`` as bags padded to the longest ``[bags, length]``, and which of these are in their bag."""
    ends = torch.cat([offsets, offsets.new_tensor([len(values)])]) if not include_last_offset else offsets
    lengths = ends[1:] - ends[:-1]
    places = torch.arange(max(1, int(lengths.max())), device=values.device)
    inside = places < lengths.unsqueeze(1)
    index = (ends[:-1].unsqueeze(1) + places).clamp(max=max(0, len(values) - 1))
    return (values if len(values) else values.new_zeros(1))[index], inside


def _embedding_bag(
    reads: Reads,
    context: CaptureContext,
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    if not reads.serve(weight):
        return NotImplemented
    reads.refuse_coupled_table(weight, max_norm, scale_grad_by_freq)
    bags = _bags(input, weight, offsets, include_last_offset=include_last_offset)
    reads.require_rows("embedding_bag", (weight,), bags, context)
    inside = torch.ones_like(input, dtype=torch.bool)
    if offsets is not None:
        flat = input
        input, inside = _bag(flat, offsets, include_last_offset)
        if per_sample_weights is not None:
            per_sample_weights, _ = _bag(per_sample_weights, offsets, include_last_offset)
    if padding_idx is not None:
        padding_idx %= weight.shape[0]
        inside = inside & (input != padding_idx)
    found = EmbeddingUse.apply(input, weight, padding_idx, context, False)
    inside = inside.unsqueeze(2)
    if mode == "max":
        return found.masked_fill(~inside, -torch.inf).max(1).values.masked_fill(~inside.any(1), 0)
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(2)
    total = found.masked_fill(~inside, 0).sum(1)
    return total / inside.sum(1).clamp(min=1) if mode == "mean" else total


def _bags(input: torch.Tensor, weight: torch.Tensor, offsets: Any = None, *rest: Any, **options: Any) -> torch.Tensor:
    """What has a bag for each of its first axis: the ids, or where each bag begins in flat ones."""
    if offsets is None:
        return input
    return offsets[:-1] if options.get("include_last_offset", rest[6] if len(rest) > 6 else False) else offsets


_embedding_bag.operand = _bags  # type: ignore[attr-defined]
HANDLERS: dict[Any, Callable[..., Any]] = {F.embedding_bag: _embedding_bag}
