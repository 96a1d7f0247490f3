"""``add_noise_``: x + std N(0, 1) in one pass over memory, 8 bytes an element in float32."""

import torch
import triton
import triton.language as tl

from .chacha import BLOCKS, normals
from .grid import numbers_of_grid
from .launch import cdiv, on_device_of, to_device_of
from .settle import NO_LIST, new_list, settle, store_rounded
from .tiles import load_flat, store_flat


@triton.jit(do_not_specialize=["capacity", "n", "begin", "std", "spacing", "inverse"])
def add_noise_kernel(
    p_x, p_position, p_list, p_sums, capacity, n, begin, std, spacing, inverse, b_blocks: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    # Where the sum is ROUNDED, ``std`` is in units of the grid's spacing. The first element is that of block ``begin``.
    first = tl.program_id(0).to(tl.int64) * b_blocks
    block = first + tl.arange(0, b_blocks)
    z = normals(p_position, (begin + block).to(tl.uint32), ROUNDED)
    o_x = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (first + b_blocks) * 16 <= n
    # [b_blocks, 16]
    x = load_flat(p_x, o_x, n, inside).to(tl.float32)
    if ROUNDED:
        store_rounded(x, z, p_x, p_list, p_sums, capacity, block, o_x, n, inside, std, spacing, inverse)
    else:
        # [b_blocks, 16]
        store_flat(p_x, o_x, n, inside, tl.fma(z, std, x).to(p_x.dtype.element_ty))


def add_noise_(x: torch.Tensor, std: float, position: torch.Tensor, secure_rounding: bool, first: int = 0) -> None:
    """Add ``std`` times normal ``first + i`` of ``position`` (int32 [12]) to element i of the flattened ``x``, in place.

    ``x``: float32, bfloat16 or float16, any strides; a strided one is copied once, and one that begins within a block of 16.
    """
    if std == 0.0 or x.numel() == 0:
        return
    flat, within = x.contiguous(), first % 16
    if within:
        flat = torch.cat([flat.new_zeros(within), flat.view(-1)])
    with on_device_of(x):
        there = to_device_of(position, x)
        opened = new_list(flat.numel(), x.device, with_sums=True) if secure_rounding else NO_LIST
        add_noise_kernel[(cdiv(flat.numel(), 16 * BLOCKS),)](
            flat, there, *opened, flat.numel(), first // 16,
            *(numbers_of_grid(std) if secure_rounding else (float(std), 0.0, 0.0)),
            b_blocks=BLOCKS, ROUNDED=secure_rounding, enable_fp_fusion=True, num_warps=4,
        )  # fmt: skip
        if secure_rounding:
            settle(flat, there, opened, first // 16, std)
    if flat is not x:
        x.copy_(flat[within:].view(x.shape) if within else flat)
