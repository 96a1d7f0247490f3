"""The second half of every reduction: partial results added up in a fixed order, so that two runs give the same bits."""

import torch
import triton
import triton.language as tl

from .launch import on_device_of


@triton.jit(do_not_specialize=["units", "columns", "parts", "b_tile"])
def sum_parts_kernel(p_parts, p_out, p_offsets, units, columns, parts, b_tile, b: tl.constexpr):
    unit = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    if p_offsets is None:
        first = unit * parts
        last = first + parts
    else:
        start = tl.load(p_offsets + unit)
        end = tl.load(p_offsets + unit + 1)
        slot = start // b_tile + unit
        first = slot * parts
        last = (slot + (end - start + b_tile - 1) // b_tile) * parts
    total = tl.zeros((b,), tl.float32)
    for i in range(first, last, b):
        o_part = i + tl.arange(0, b)
        # [b]
        total += tl.load(p_parts + row * columns + o_part, mask=o_part < last, other=0.0)
    tl.store(p_out + row * units + unit, tl.sum(total, 0))


def _launch(parts: torch.Tensor, offsets: torch.Tensor | None, units: int, per_slot: int, b_tile: int) -> torch.Tensor:
    rows = parts.shape[0]
    out = torch.empty(rows, units, dtype=torch.float32, device=parts.device)
    with on_device_of(parts):
        sum_parts_kernel[(units, rows)](
            parts, out, offsets, units, parts.shape[1], per_slot,
            b_tile=b_tile, b=128, enable_fp_fusion=True, num_warps=1,
        )  # fmt: skip
    return out


def sum_parts(parts: torch.Tensor, offsets: torch.Tensor, per_slot: int, b_tile: int) -> torch.Tensor:
    """Sum partial results [rows, slots * per_slot] by unit: float32 [rows, B].

    Slots number the row tiles, ``b_tile`` tokens long, of all units: see ``tiles.unit_of_slot``.
    """
    return _launch(parts, offsets, offsets.shape[0] - 1, per_slot, b_tile)


def sum_slots(parts: torch.Tensor, slots: int, per_slot: int) -> torch.Tensor:
    """Sum partial results [rows, slots * per_slot] by slot: float32 [rows, slots]."""
    return _launch(parts, None, slots, per_slot, 1)
