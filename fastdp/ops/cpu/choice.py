"""``exponential_choice`` on processors: csrc/choice.cpp, handed the tokens in the order of their laws."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

import fastdp._native as _native
from fastdp.ops.stream import native_threads

from .snap import centre_of, survey


def exponential_choice(
    ids: Tensor,
    table: Tensor,
    scale: Tensor,
    position: Tensor,
    cap: float | None,
    log_prior: Tensor | None,
    candidate_scale: Tensor | None,
) -> Tensor:
    """:func:`fastdp.ops.exponential_choice` on a processor."""
    table = table.detach().float().contiguous()
    bits = survey("table", table)
    result = torch.empty(ids.shape, dtype=torch.int64)
    if not ids.numel():
        return result
    flat = ids.reshape(-1).numpy()
    scales = np.broadcast_to(scale.double().numpy(), ids.shape).reshape(-1) if scale.dim() else np.full(1, float(scale))
    # Keys of sixteen bits are sorted by their digits, ten times faster than by comparison.
    keys = flat.astype(np.uint16) if table.shape[0] <= 1 << 16 else flat
    order = np.lexsort((scales, flat)) if scale.dim() else np.argsort(keys, kind="stable")
    sorted_ids = flat[order]
    sorted_scales = scales[order] if scale.dim() else np.broadcast_to(scales, len(order))
    new = np.ones(len(order) + 1, bool)
    new[1:-1] = (sorted_ids[1:] != sorted_ids[:-1]) | (sorted_scales[1:] != sorted_scales[:-1])
    starts = np.flatnonzero(new)
    law_ids, law_scales = sorted_ids[starts[:-1]], sorted_scales[starts[:-1]].copy()
    _native.exponential_choice(
        table=table,
        rows=table.shape[0],
        d=table.shape[1],
        centre=centre_of(table),
        table_bits=bits,
        order=order,
        starts=starts,
        laws=len(law_ids),
        law_ids=law_ids,
        law_scales=law_scales,
        log_prior=None if log_prior is None else log_prior.contiguous(),
        slopes=None if candidate_scale is None else candidate_scale.contiguous(),
        cap=math.inf if cap is None else cap,
        position=position,
        out=result,
        threads=native_threads(),
    )
    return result
