"""Roundings that float32 leaves open: kernels put them on a list in device memory, and a small launch after theirs settles all.

So nothing of float64 is compiled into a kernel that passes over all numbers, and none of its programs waits for one element.
Nothing is released meanwhile: a kernel leaves NaN, or what was there before, where it puts an element on the list.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .grid import numbers_of_grid, on_grid, settle_element
from .launch import cdiv
from .tiles import store_flat

#: Blocks that one program settles, one a thread.
SETTLE_BLOCK = 32


class OpenElements(NamedTuple):
    """A list: int64 [capacity + 1, 2] of the count and, for each entry, (line, block) and a bit for each open element.

    ``sums``, float32 [capacity, 16], are those of the blocks on the list, where no one else keeps them.
    """

    entries: torch.Tensor | None
    sums: torch.Tensor | None
    capacity: int


#: For launches that round nothing.
NO_LIST = OpenElements(None, None, 0)


@triton.jit
def put_on_list(p_list, capacity, line, block, n, is_open):
    """Put each of ``block`` (int64 [B]) that has open elements before ``n`` on the list: its place, and whether it has one.

    The place is negative for a block without open elements, and ``capacity`` or more where the list is full. Places differ
    from run to run; what is settled does not depend on them.
    """
    bits = tl.sum(tl.where(is_open, 1 << tl.arange(0, 16)[None, :], 0), 1)
    bits &= (1 << tl.minimum(tl.maximum(n - block * 16, 0), 16).to(tl.int32)) - 1
    # A block is a thread's: counting by blocks takes no talk between threads, and hardly any thread has something to count.
    nothing = block ^ block
    place = tl.atomic_add(p_list + nothing, nothing + 1, mask=bits != 0, sem="relaxed")
    place = tl.where(bits != 0, place, -1)
    fits = (place >= 0) & (place < capacity)
    p_entry = p_list + 2 + 2 * place
    tl.store(p_entry, (line << 32) | block, mask=fits)
    tl.store(p_entry + 1, bits.to(tl.int64), mask=fits)
    return place, fits


@triton.jit
def own_entries(p_list, capacity, b: tl.constexpr):
    """Of a program's entries, [b] each: their places, lines, blocks (uint32) and a bit for each open element."""
    place = tl.program_id(0).to(tl.int64) * b + tl.arange(0, b)
    taken = place < tl.minimum(tl.load(p_list), capacity)
    key = tl.load(p_list + 2 + 2 * place, mask=taken, other=0)
    bits = tl.load(p_list + 3 + 2 * place, mask=taken, other=0).to(tl.int32)
    return place, key >> 32, (key & 0xFFFFFFFF).to(tl.uint32), bits


@triton.jit
def lowest(bits):
    """The number of the lowest bit of each: a float32's exponent says it."""
    return ((bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def store_rounded(x, z, p_out, p_list, p_sums, capacity, block, o_x, n, inside, ratio, spacing, inverse):
    """Store `on_grid`, and NaN where it is open: blocks with such elements go on the list, with all their x, float32 [B, 16].

    What the list has no room for stays NaN.
    """
    released, is_open = on_grid(x, z, ratio, spacing, inverse)
    # [B, 16]
    store_flat(p_out, o_x, n, inside, tl.where(is_open, float("nan"), released).to(p_out.dtype.element_ty))
    # Last, as what follows waits for the list's answer.
    place, fits = put_on_list(p_list, capacity, tl.full((), 0, tl.int64), block, n, is_open)
    # [B, 16]
    tl.store(p_sums + place[:, None] * 16 + tl.arange(0, 16)[None, :], x, mask=fits[:, None])


@triton.jit(do_not_specialize=["capacity", "begin", "std", "spacing", "inverse"])
def settle_kernel(p_x, p_position, p_list, p_sums, capacity, begin, std, spacing, inverse, b: tl.constexpr):
    place, _, block, bits = own_entries(p_list, capacity, b)
    # Hardly any block has two.
    while tl.max(bits, 0) > 0:
        element = lowest(bits)
        # [b]
        x = tl.load(p_sums + place * 16 + element, mask=bits != 0, other=0.0)
        x = settle_element(x, p_position, (begin + block).to(tl.uint32), element, std, spacing, inverse)
        # [b]
        tl.store(p_x + block.to(tl.int64) * 16 + element, x.to(p_x.dtype.element_ty), mask=bits != 0)
        bits &= bits - 1


def capacity_of(n: int) -> int:
    """Blocks that a list for ``n`` elements has room for: more are open with a probability below 2^-180.

    Float32 errs by no more than the room that it leaves open, so the real y = past + ratio z of an open element lies within twice
    that room of the middle between two whole numbers. With ratio in [16, 32) y past a whole number is even to 1e-2000 whatever
    the sum: an element is open with a probability of at most 4 * 32 * 5.4e-6 = 6.92e-4. Where |z| < 2^-12 the room is 2^-15
    ratios, and z within an interval of 2^-13, which adds at most .4 * 2^-13 = 4.9e-5; marked normals add 2^-32. Real normals are
    independent, and so are these events. With mu = 7.5e-4 n and a = n / 1024 + 256, more than a of n happen with a probability of
    at most exp(-(a ln(a / mu) - a + mu)) (Chernoff), whose exponent is nowhere below 129 = 187 ln 2. Blocks with an open element
    are no more than open elements.
    """
    return n // 1024 + 256


def new_list(n: int, device: torch.device, *, with_sums: bool) -> OpenElements:
    """An empty list for ``n`` elements, with or without room for the sums of its blocks."""
    capacity = capacity_of(n)
    entries = torch.zeros(capacity + 1, 2, dtype=torch.int64, device=device)
    return OpenElements(entries, torch.empty(capacity, 16, device=device) if with_sums else None, capacity)


def settle(x: torch.Tensor, position: torch.Tensor, opened: OpenElements, begin: int, std: float) -> None:
    """Write into contiguous ``x``, whose first block is ``begin``, the rounded sum of each element that is on the list."""
    settle_kernel[(cdiv(opened.capacity, SETTLE_BLOCK),)](
        x, position, *opened, begin, *numbers_of_grid(std), b=SETTLE_BLOCK, enable_fp_fusion=True, num_warps=1
    )
