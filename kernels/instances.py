"""Norms and weighted sums of per-unit gradients that lie in memory: vectors, adapters, the one-example route.

Both read each gradient once. A program of the norms measures one chunk of one unit; a program of the sums owns a chunk of
the result and adds the units up in their order, so two runs give the same bits.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from . import groups
from .direct import ABSOLUTE, MASKED_SQUARE, SQUARE
from .launch import cdiv, on_device_of, serves
from .reduce import sum_slots

INSTANCE_CHUNK = 4096
COLUMNS = 1024


@triton.jit(do_not_specialize=["units", "chunks"])
def instance_norm_kernel(p_x, p_mask, p_parts, units, chunks, n, b: tl.constexpr, KIND: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    o_x = (pid % chunks) * b + tl.arange(0, b)
    m_x = o_x < n
    # [b]
    x = tl.load(p_x + (pid // chunks) * n + o_x, mask=m_x, other=0.0).to(tl.float32)
    if KIND == ABSOLUTE:
        tl.store(p_parts + pid, tl.sum(tl.abs(x), 0))
    else:
        square = x * x
        if KIND == MASKED_SQUARE:
            # [b]
            inside = tl.load(p_mask + o_x, mask=m_x, other=0) != 0
            tl.store(p_parts + pid, tl.sum(tl.where(inside, square, 0.0), 0))
            square = tl.where(inside, 0.0, square)
            tl.store(p_parts + units.to(tl.int64) * chunks + pid, tl.sum(square, 0))
        else:
            tl.store(p_parts + pid, tl.sum(square, 0))


@triton.jit(do_not_specialize=["units"])
def instance_sum_kernel(p_x, p_inside, p_outside, p_mask, p_out, units, n, b: tl.constexpr, MASKED: tl.constexpr):
    o_x = tl.program_id(0).to(tl.int64) * b + tl.arange(0, b)
    m_x = o_x < n
    if MASKED:
        # [b]
        inside = tl.load(p_mask + o_x, mask=m_x, other=0) != 0
    total = tl.zeros((b,), tl.float32)
    p_row = p_x + o_x
    for unit in range(units):
        weight = tl.where(m_x, tl.load(p_inside + unit).to(tl.float32), 0.0)
        if MASKED:
            weight = tl.where(inside | ~m_x, weight, tl.load(p_outside + unit).to(tl.float32))
        # An entry of weight 0 is not loaded: zero times NaN would be NaN.
        # [b]
        x = tl.load(p_row, mask=weight != 0.0, other=0.0)
        total += weight * x.to(tl.float32)
        p_row += n
    # [b]
    tl.store(p_out + o_x, total, mask=m_x)


@serves(1)
def instance_norms(instances: torch.Tensor, measure: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Norms [1, B], float32, of gradients [B, ...]: float32, bfloat16 or float16, strided ones are copied once.

    With ``mask`` (bool), [2, B]: of the entries where it is True, then where it is False.
    """
    units, rows = instances.shape[0], 1 if mask is None else 2
    if instances.numel() == 0:
        return torch.zeros(rows, units, dtype=torch.float32, device=instances.device)
    instances = instances.contiguous()
    n = instances.numel() // units
    chunks = cdiv(n, INSTANCE_CHUNK)
    parts = torch.empty(rows, units * chunks, dtype=torch.float32, device=instances.device)
    with on_device_of(instances):
        instance_norm_kernel[(units * chunks,)](
            instances,
            parts if mask is None else mask.contiguous().view(torch.uint8),
            parts,
            units,
            chunks,
            n,
            b=INSTANCE_CHUNK,
            KIND=measure,
            enable_fp_fusion=True,
            num_warps=4,
        )
    return sum_slots(parts, units, chunks)


@serves(1)
def instance_sum(
    instances: torch.Tensor,
    weights: torch.Tensor,
    weights_unmasked: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """``sum over units of weights[b] instances[b]``, float32; where ``mask`` is False the weights are ``weights_unmasked``.

    ``instances`` [B, ...] float32, bfloat16 or float16, strided ones are copied once.
    """
    instances = instances.contiguous()
    out = torch.zeros(instances.shape[1:], dtype=torch.float32, device=instances.device)
    if out.numel():
        masked = mask is not None and weights_unmasked is not None
        weights = weights.contiguous()
        unmasked = weights if weights_unmasked is None else weights_unmasked.contiguous()
        bits = weights if mask is None else mask.contiguous().view(torch.uint8)
        with on_device_of(out):
            instance_sum_kernel[(cdiv(out.numel(), COLUMNS),)](
                instances,
                weights,
                unmasked,
                bits,
                out,
                instances.shape[0],
                out.numel(),
                b=COLUMNS,
                MASKED=masked,
                enable_fp_fusion=True,
                num_warps=4,
            )
    return out


def _grouped(instances: Sequence[torch.Tensor]) -> bool:
    return {x.dtype for x in instances} == {torch.float32} and all(map(torch.Tensor.is_contiguous, instances))


@serves(1)
def instance_norms_group(instances: Sequence[torch.Tensor]) -> torch.Tensor:
    """Squared norms [k, B] of k tensors [B, ...], in two launches."""
    if _grouped(instances):
        return groups.instance_norms(instances)
    return torch.stack([instance_norms(x, SQUARE, None)[0] for x in instances])


@serves(1)
def instance_sum_group(instances: Sequence[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    """Weighted sums over the units of k tensors [B, ...], weights [k, B]: one launch."""
    if _grouped(instances):
        return groups.instance_sums(instances, weights)
    return [instance_sum(x, row, None, None) for x, row in zip(instances, weights)]
