"""Weighted sums of all tokens' gradients: products of blocks of tokens, each weight applied once to what its unit adds.

A program has one tile of the sum and walks over blocks of tokens that belong to one unit each (`blocks`). Products add up
in the matrix units' own accumulator; where a unit ends, or every 512 tokens of it, that is multiplied by the unit's
weight and added to the tile in float32. So no row is scaled, 16-bit factors meet as they are, loads and products of
the next blocks are under way meanwhile, and a tensor core, which truncates, never adds to a long sum. What a unit of
weight 0 would add is selected out, NaN included.

Tiles that do not fill the last round of processors are cut along the tokens; their parts are added up in order by a second
launch.
"""

import torch
import triton
import triton.language as tl

from .blocks import COUNT_MASK, ENDS, UNIT_SHIFT, blocks_of, runs_of
from .direct import side_tile
from .launch import beside, on_device_of, processors, row_tile
from .mask import load_mask, pack_mask
from .tiles import multiply

_BAND = tl.constexpr(8)
#: Tokens that each part of a cut tile has at least.
_SHORTEST_PART = 512


@triton.jit
def _corner(tile, tiles_m, tiles_n, b_m: tl.constexpr, b_n: tl.constexpr):
    # Tiles go by bands of eight rows, down a column of the band and on to the next: neighbours in time share factors.
    band = tile // (_BAND * tiles_n)
    rows = tl.minimum(tiles_m - band * _BAND, _BAND)
    inner = tile - band * _BAND * tiles_n
    return (band * _BAND + inner % rows) * b_m, inner // rows * b_n


@triton.jit(do_not_specialize=["slots", "tiles_m", "tiles_n", "whole", "splits"])
def _weighted_kernel(
    p_left, p_right, p_table, p_weights, p_outside, p_bits, p_out, p_parts, slots, tiles_m, tiles_n, whole, splits,
    m, n, bytes_a_row, stride_lt, stride_lm, stride_rt, stride_rn, stride_om, stride_on,
    b_m: tl.constexpr, b_n: tl.constexpr, b_t: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    blocks = tl.load(p_table)
    tile = pid
    first = 0
    last = blocks
    if pid >= whole:
        tile = whole + (pid - whole) // splits
        split = (pid - whole) % splits
        first = (blocks.to(tl.int64) * split // splits).to(tl.int32)
        last = (blocks.to(tl.int64) * (split + 1) // splits).to(tl.int32)
    from_m, from_n = _corner(tile, tiles_m, tiles_n, b_m, b_n)
    o_t = tl.arange(0, b_t)
    o_m = from_m + tl.arange(0, b_m)
    o_n = from_n + tl.arange(0, b_n)
    m_m = o_m < m
    m_n = o_n < n
    p_l = p_left + o_m[:, None].to(tl.int64) * stride_lm + o_t[None, :].to(tl.int64) * stride_lt
    p_r = p_right + o_t[:, None].to(tl.int64) * stride_rt + o_n[None, :].to(tl.int64) * stride_rn
    total = tl.zeros((b_m, b_n), tl.float32)
    acc = tl.zeros((b_m, b_n), tl.float32)
    for at in range(first, last):
        start = tl.load(p_table + 1 + at).to(tl.int64)
        word = tl.load(p_table + 1 + slots + at)
        m_t = o_t < (word & COUNT_MASK)
        # [b_m, b_t]
        left = tl.load(p_l + start * stride_lt, mask=m_m[:, None] & m_t[None, :], other=0.0)
        # [b_t, b_n]
        right = tl.load(p_r + start * stride_rt, mask=m_t[:, None] & m_n[None, :], other=0.0)
        acc = multiply(left, right, acc, PRECISION)
        if (at == last - 1) | ((word & ENDS) != 0):
            unit = word >> UNIT_SHIFT
            weight = tl.load(p_weights + unit).to(tl.float32)
            if MASKED:
                inside = load_mask(p_bits, o_m, o_n, m_m, m_n, bytes_a_row)
                weight = tl.where(inside, weight, tl.load(p_outside + unit).to(tl.float32))
            total += tl.where(weight == 0.0, 0.0, acc) * weight
            acc = tl.zeros((b_m, b_n), tl.float32)
    if pid < whole:
        m_tile = m_m[:, None] & m_n[None, :]
        p_tile = p_out + o_m[:, None].to(tl.int64) * stride_om + o_n[None, :].to(tl.int64) * stride_on
        # [b_m, b_n]
        tl.store(p_tile, tl.load(p_tile, mask=m_tile, other=0.0) + total, mask=m_tile)
    else:
        o_part = tl.arange(0, b_m)[:, None] * b_n + tl.arange(0, b_n)[None, :]
        # [b_m, b_n]
        tl.store(p_parts + (pid - whole).to(tl.int64) * (b_m * b_n) + o_part, total)


@triton.jit(do_not_specialize=["tiles_m", "tiles_n", "whole", "splits"])
def _add_parts_kernel(
    p_parts, p_out, tiles_m, tiles_n, whole, splits, m, n, stride_om, stride_on,
    b_m: tl.constexpr, b_n: tl.constexpr, b_row: tl.constexpr,
):  # fmt: skip
    rest = tl.program_id(0)
    o_row = tl.program_id(1) * b_row + tl.arange(0, b_row)
    o_column = tl.arange(0, b_n)
    from_m, from_n = _corner(whole + rest, tiles_m, tiles_n, b_m, b_n)
    o_m = (from_m + o_row)[:, None]
    o_n = (from_n + o_column)[None, :]
    m_tile = (o_m < m) & (o_n < n)
    p_part = p_parts + rest.to(tl.int64) * splits * (b_m * b_n) + o_row[:, None] * b_n + o_column[None, :]
    total = tl.zeros((b_row, b_n), tl.float32)
    for split in range(splits):
        # [b_row, b_n]
        total += tl.load(p_part + split * (b_m * b_n))
    p_tile = p_out + o_m.to(tl.int64) * stride_om + o_n.to(tl.int64) * stride_on
    # [b_row, b_n]
    tl.store(p_tile, tl.load(p_tile, mask=m_tile, other=0.0) + total, mask=m_tile)


def deal(tiles: int, programs: int, most: int) -> tuple[int, int]:
    """How many of ``tiles`` tiles are made whole, and into how many parts, at most ``most``, each of the others is cut.

    ``programs`` run at a time. Whole rounds of them stay whole; of what is left, the fewest parts are taken that come within
    a fortieth of a tile of the shortest time.
    """
    whole, rest = tiles // programs * programs, tiles % programs
    cuts = range(1, max(1, min(most, programs)) + 1)
    times = {cut: -(-rest * cut // programs) / cut for cut in cuts}
    splits = next(cut for cut in cuts if times[cut] <= min(times.values()) + 0.025)
    return (tiles, 1) if splits == 1 else (whole, splits)


def weighted_sum_(
    out: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    weights: torch.Tensor,
    weights_unmasked: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    precision: str = "ieee",
    dealt: tuple[int, int] | None = None,
) -> None:
    """``out += sum over units b of weights[b] G_b``; where ``mask`` is False, of ``weights_unmasked[b] G_b``.

    ``out`` float32 [m, n], any strides; left [N, m] and right [N, n] float32, bfloat16 or float16, any strides; weights
    [B] float; mask bool [m, n]; offsets int64 [B + 1]. Without offsets the weights are [N], one a token. ``dealt``: whole
    tiles, and parts of each other one, as `deal` has them.
    """
    tokens, m, n = right.shape[0], left.shape[1], right.shape[1]
    if tokens == 0 or m == 0 or n == 0:
        return
    masked = mask is not None and weights_unmasked is not None
    wide = torch.float32 in (left.dtype, right.dtype)
    b_t = 32 if wide else 64
    if offsets is None:
        offsets = runs_of(weights) if weights_unmasked is None else runs_of(weights, weights_unmasked)
        begins = offsets[:-1].clamp(max=tokens - 1)
        weights = weights[begins]
        weights_unmasked = None if weights_unmasked is None else weights_unmasked[begins]
    else:
        offsets = beside(offsets, right)
        b_t = row_tile(tokens, offsets.shape[0] - 1, b_t)
    b_m, b_n = side_tile(m, wide), side_tile(n, wide)
    if masked:  # the mask's bits take registers
        b_n = min(64, b_n)
    large = b_m * b_n > 4096
    tiles_m, tiles_n = -(-m // b_m), -(-n // b_n)
    tiles = tiles_m * tiles_n
    whole, splits = dealt or deal(tiles, (1 if large else 4) * processors(out.device), max(1, tokens // _SHORTEST_PART))
    table, slots = blocks_of(offsets, tokens, b_t)
    rest = tiles - whole
    parts = out if rest == 0 else torch.empty(rest * splits, b_m, b_n, dtype=torch.float32, device=out.device)
    # A kernel without a mask never reads these, and has no optional arguments.
    unmasked = weights if weights_unmasked is None else weights_unmasked
    bits = weights if mask is None else pack_mask(mask)
    with on_device_of(out):
        _weighted_kernel[(whole + rest * splits,)](
            left,
            right,
            table,
            weights,
            unmasked,
            bits,
            out,
            parts,
            slots,
            tiles_m,
            tiles_n,
            whole,
            splits,
            m,
            n,
            bits.shape[-1],
            *left.stride(),
            *right.stride(),
            *out.stride(),
            b_m=b_m,
            b_n=b_n,
            b_t=b_t,
            MASKED=masked,
            PRECISION=precision,
            enable_fp_fusion=True,
            num_warps=8 if large or masked and wide else 4,
            num_stages=5,  # the table is read two blocks before the factors it points to, these two before their product
        )
        if rest:
            b_row = max(1, 2048 // b_n)
            _add_parts_kernel[(rest, -(-b_m // b_row))](
                parts,
                out,
                tiles_m,
                tiles_n,
                whole,
                splits,
                m,
                n,
                *out.stride(),
                b_m=b_m,
                b_n=b_n,
                b_row=min(b_row, b_m),
                num_warps=4,
            )
