"""``clip_noise``: each example scaled to a bounded norm, plus noise; and the gradient of the clip. Reads twice, writes once.

Norms are summed in float64, chunk by chunk in a fixed order, so that a large finite example is not taken for an
infinite one and two runs give the same bits.
"""

import torch
import triton
import triton.language as tl

from .chacha import BLOCKS, normals
from .grid import numbers_of_grid
from .launch import cdiv, on_device_of, to_device_of
from .settle import NO_LIST, new_list, settle, store_rounded
from .tiles import load_flat, store_flat

# Elements that one program of the dot products reads: large enough that its float64 sums hide behind the loads.
CLIP_CHUNK = 16384
CLIP_STEP = 2048


@triton.jit(do_not_specialize=["width", "chunks"])
def row_dots_kernel(
    p_x, p_y, p_partial, width, chunks, b_step: tl.constexpr, b_chunk: tl.constexpr, ALIGNED: tl.constexpr
):
    # Triton infers wide loads from this multiple of 16; a specialized width would compile a kernel for each.
    if ALIGNED:
        width = width // 16 * 16
    pid = tl.program_id(0).to(tl.int64)
    row = pid // chunks
    start = (pid % chunks) * b_chunk
    total = tl.zeros((b_step,), tl.float64)
    for i in range(0, b_chunk, b_step):
        o_row = start + i + tl.arange(0, b_step)
        # [b_step]
        x = tl.load(p_x + row * width + o_row, mask=o_row < width, other=0.0).to(tl.float64)
        y = tl.load(p_y + row * width + o_row, mask=o_row < width, other=0.0).to(tl.float64)
        total += x * y
    tl.store(p_partial + pid, tl.sum(total, 0))


@triton.jit
def _sum_chunks(p_partial, row, chunks, b_chunks: tl.constexpr):
    total = tl.zeros((b_chunks,), tl.float64)
    for i in range(0, chunks, b_chunks):
        o_chunk = i + tl.arange(0, b_chunks)
        # [b_chunks]
        total += tl.load(p_partial + row * chunks + o_chunk, mask=o_chunk < chunks, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _is_clipped(norm, max_norm):
    # Rounding of its sum may move a norm by 2^-28 of itself.
    return norm > max_norm * (1.0 - 1.0 / 268435456.0)


@triton.jit
def _root_factor(norm, max_norm):
    # The root of min(1, max_norm / norm), which itself may be below float32's range; 0 for a norm that is not finite. Below 1
    # the factor is smaller by 2^-21, more than all roundings, so that no row is ever left longer than the bound.
    factor = tl.where(_is_clipped(norm, max_norm), max_norm / norm * (1.0 - 1.0 / 2097152.0), 1.0)
    return tl.where(norm < float("inf"), tl.sqrt(factor), 0.0)


@triton.jit(do_not_specialize=["chunks"])
def forward_factor_kernel(p_partial, p_norm, p_root, chunks, max_norm, b_chunks: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    norm = tl.sqrt(_sum_chunks(p_partial, row, chunks, b_chunks))
    tl.store(p_norm + row, norm)
    tl.store(p_root + row, _root_factor(norm, max_norm).to(tl.float32))


@triton.jit(do_not_specialize=["chunks"])
def backward_factor_kernel(p_partial, p_norm, p_root, p_pull, chunks, max_norm, b_chunks: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dot = _sum_chunks(p_partial, row, chunks, b_chunks)
    norm = tl.load(p_norm + row)
    # The share of x that leaves the gradient, <g, x> / |x|^2, where the row was clipped.
    pull = tl.where(_is_clipped(norm, max_norm), dot / (norm * norm), 0.0)
    tl.store(p_root + row, _root_factor(norm, max_norm).to(tl.float32))
    tl.store(p_pull + row, pull.to(tl.float32))


@triton.jit
def _rows_of(first, o_tile, width, b_tile: tl.constexpr):
    # Rows of the elements first + o_tile, with one 64-bit division a program instead of one an element.
    row = first // width
    within = first - row * width + o_tile
    if width >= b_tile:
        rows = row + (within >= width).to(tl.int64)
    else:
        rows = row + (within.to(tl.int32) // width.to(tl.int32)).to(tl.int64)
    return rows


@triton.jit(do_not_specialize=["capacity", "n", "width"])
def apply_kernel(
    p_x, p_out, p_root, p_position, p_list, p_sums, capacity, n, width, std, spacing, inverse,
    b_blocks: tl.constexpr, NOISY: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * b_blocks
    block = first + tl.arange(0, b_blocks)
    o_tile = tl.arange(0, b_blocks)[:, None] * 16 + tl.arange(0, 16)[None, :]
    o_x = first * 16 + o_tile
    rows = _rows_of(first * 16, o_tile, width.to(tl.int64), b_blocks * 16)
    # [b_blocks, 16]
    root = tl.load(p_root + rows, mask=o_x < n, other=0.0)
    if NOISY:
        z = normals(p_position, block.to(tl.uint32), ROUNDED)
    else:
        z = tl.zeros((b_blocks, 16), tl.float32)
    inside = (first + b_blocks) * 16 <= n
    # [b_blocks, 16]
    x = load_flat(p_x, o_x, n, inside).to(tl.float32)
    # A root of zero removes the example by selection: zero times NaN would be NaN.
    kept = tl.where(root != 0.0, x * root * root, 0.0)
    if ROUNDED:
        store_rounded(kept, z, p_out, p_list, p_sums, capacity, block, o_x, n, inside, std, spacing, inverse)
    else:
        # [b_blocks, 16]
        store_flat(p_out, o_x, n, inside, tl.fma(z, std, kept).to(p_out.dtype.element_ty))


@triton.jit(do_not_specialize=["n", "width"])
def pull_back_kernel(p_grad, p_x, p_out, p_root, p_pull, n, width, b_tile: tl.constexpr, ALIGNED: tl.constexpr):
    if ALIGNED:
        n = n // 16 * 16
    first = tl.program_id(0).to(tl.int64) * b_tile
    o_tile = tl.arange(0, b_tile)
    o_x = first + o_tile
    m_x = o_x < n
    rows = _rows_of(first, o_tile, width.to(tl.int64), b_tile)
    # [b_tile]
    root = tl.load(p_root + rows, mask=m_x, other=0.0)
    pull = tl.load(p_pull + rows, mask=m_x, other=0.0)
    g = tl.load(p_grad + o_x, mask=m_x).to(tl.float32)
    x = tl.load(p_x + o_x, mask=m_x).to(tl.float32)
    out = tl.where(root != 0.0, tl.fma(-pull, x, g) * root * root, 0.0)
    # [b_tile]
    tl.store(p_out + o_x, out.to(p_out.dtype.element_ty), mask=m_x)


def _row_dots(x: torch.Tensor, y: torch.Tensor, rows: int, width: int) -> tuple[torch.Tensor, int]:
    """Inner products of rows of x and y, float64 [rows, chunks], by chunks of `CLIP_CHUNK` elements; and their number."""
    chunks = max(1, cdiv(width, CLIP_CHUNK))
    partial = torch.empty(rows, chunks, dtype=torch.float64, device=x.device)
    row_dots_kernel[(rows * chunks,)](
        x, y, partial, width, chunks,
        b_step=CLIP_STEP, b_chunk=CLIP_CHUNK, ALIGNED=width % 16 == 0, enable_fp_fusion=True, num_warps=4,
    )  # fmt: skip
    return partial, chunks


def clip_noise(
    x: torch.Tensor, max_norm: float, std: float, position: torch.Tensor, secure_rounding: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x[b] min(1, max_norm / |x[b]|) + std z`` for x [B, ...], any strides, and the norms, float64 [B].

    An example with an infinity or a NaN becomes noise alone.
    """
    flat = x.contiguous()
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    rows = x.shape[0]
    norm = torch.zeros(rows, dtype=torch.float64, device=x.device)
    if x.numel() == 0:
        return out, norm
    width = x.numel() // rows
    rounded = secure_rounding and std > 0.0
    with on_device_of(x):
        partial, chunks = _row_dots(flat, flat, rows, width)
        root = torch.empty(rows, dtype=torch.float32, device=x.device)
        forward_factor_kernel[(rows,)](
            partial, norm, root, chunks, float(max_norm), b_chunks=128, enable_fp_fusion=True, num_warps=1
        )
        device_position = to_device_of(position, x)
        # Blocks with an element that float32 cannot round, which a second pass settles.
        opened = new_list(x.numel(), x.device, with_sums=True) if rounded else NO_LIST
        apply_kernel[(cdiv(x.numel(), 16 * BLOCKS),)](
            flat, out, root, device_position, *opened, x.numel(), width,
            *(numbers_of_grid(std) if rounded else (float(std), 0.0, 0.0)),
            b_blocks=BLOCKS, NOISY=std != 0.0, ROUNDED=rounded, enable_fp_fusion=True, num_warps=4,
        )  # fmt: skip
        if rounded:
            settle(out, device_position, opened, 0, std)
    return out, norm


def clip_noise_backward(grad: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Gradient of the clip of `clip_noise`: ``factor (g - x <g, x> / |x|^2)`` where an example was clipped."""
    grad, flat = grad.contiguous(), x.contiguous()
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    rows = x.shape[0]
    width = x.numel() // rows
    with on_device_of(x):
        partial, chunks = _row_dots(grad, flat, rows, width)
        root = torch.empty(rows, dtype=torch.float32, device=x.device)
        pull = torch.empty_like(root)
        backward_factor_kernel[(rows,)](
            partial, norm.contiguous(), root, pull, chunks, float(max_norm), b_chunks=128, enable_fp_fusion=True, num_warps=1,
        )  # fmt: skip
        pull_back_kernel[(cdiv(x.numel(), CLIP_STEP),)](
            grad, flat, out, root, pull, x.numel(), width,
            b_tile=CLIP_STEP, ALIGNED=x.numel() % 16 == 0, enable_fp_fusion=True, num_warps=4,
        )  # fmt: skip
    return out
