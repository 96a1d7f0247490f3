"""Weighted sums of all tokens' gradients: products of blocks of tokens, each weight applied once to what its unit adds.

A program has one tile of one matrix and walks over blocks of tokens that belong to one unit each (`blocks`). No row is
scaled, 16-bit factors meet as they are, and loads and products of the next blocks are under way meanwhile. The matrix
units' own accumulator holds the sum over the weight of the unit that is being added: where the next unit has another
weight it is multiplied by the quotient of the two, and at the end by the last weight, so that one accumulator fills the
registers and tiles may be twice as wide. Tokens of weight 0 are not read.

Tiles of many matrices over the same tokens go out in one launch: a table in memory says where each lies. Those that do not
fill the last round of processors are cut along the tokens; their parts are added up in order by a second launch.

On Hopper and later the copy engine reads 16-bit factors by tensor descriptors (``DESCRIBED``) where all blocks are full, as it
cannot leave out the rows of the next unit.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fastdp.ops.matrices import Matrices, MatrixForm

from .blocks import COUNT_MASK, UNIT_SHIFT, blocks_of
from .direct import side_tile
from .groups import owner
from .launch import (
    TRITON_DTYPES,
    Launch,
    Table,
    enable_descriptors,
    has_wide_tiles,
    indices_on_device,
    multiprocessors,
    on_device_of,
    row_tile,
    stages_of,
    to_device_of,
    with_wide_rows,
)
from .tiles import listed_factors, multiply

_BAND = tl.constexpr(8)
#: Of a line of the table: what `listed_factors` reads, address and strides of the sum, whether it holds something already, and
#: the number of the matrix's first tile.
_FIELDS = tl.constexpr(13)
#: Strides of rows below this have places within a block that 32 bits hold.
_NEAR = 1 << 24
#: Tokens that each part of a cut tile has at least.
_SHORTEST_PART = 512


@triton.jit
def _corner(tile, m, n, b_m: tl.constexpr, b_n: tl.constexpr):
    # Tiles go by bands of eight rows, down a column of the band and on to the next: neighbours in time share factors.
    tiles_m = tl.cdiv(m, b_m)
    tiles_n = tl.cdiv(n, b_n)
    band = tile // (_BAND * tiles_n)
    rows = tl.minimum(tiles_m - band * _BAND, _BAND)
    inner = tile - band * _BAND * tiles_n
    return (band * _BAND + inner % rows) * b_m, inner // rows * b_n


@triton.jit
def _add_tile(p_line, o_m, o_n, m_tile, total, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr):
    # The tile added to what the sum holds, or put there.
    p_out = tl.load(p_line + 8).to(tl.pointer_type(tl.float32))
    stride_om = tl.load(p_line + 9).to(tl.int32)
    stride_on = tl.load(p_line + 10).to(tl.int32)
    if CONTIGUOUS:
        stride_on = 1
    if ALIGNED:
        p_out = tl.multiple_of(p_out, 16)
        stride_om = stride_om // 8 * 8
    p_tile = p_out + o_m[:, None].to(tl.int64) * stride_om + o_n[None, :].to(tl.int64) * stride_on
    if tl.load(p_line + 11) != 0:
        # [b_m, b_n]
        total += tl.load(p_tile, mask=m_tile, other=0.0)
    # [b_m, b_n]
    tl.store(p_tile, total, mask=m_tile)


@triton.jit
def _share(p_blocks, pid, whole, splits):
    # The tile of a program, and the first and last of its blocks of tokens.
    blocks = tl.load(p_blocks)
    tile = pid
    first = 0
    last = blocks
    if pid >= whole:
        tile = whole + (pid - whole) // splits
        split = (pid - whole) % splits
        first = (blocks.to(tl.int64) * split // splits).to(tl.int32)
        last = (blocks.to(tl.int64) * (split + 1) // splits).to(tl.int32)
    return tile, first, last


@triton.jit
def _weights_at(p_words, p_own, at, last):
    # A block's word, its unit's weight, and that of the next block's unit.
    word = tl.load(p_words + at)
    weight = tl.load(p_own + (word >> UNIT_SHIFT)).to(tl.float32)
    then = tl.load(p_words + tl.minimum(at + 1, last - 1))
    return word, weight, tl.load(p_own + (then >> UNIT_SHIFT)).to(tl.float32)


@triton.jit(do_not_specialize=["units", "lines", "slots", "whole", "splits", "tokens"])
def _weighted_kernel(
    p_lines, p_blocks, p_weights, p_parts, units, lines, slots, whole, splits, tokens,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr, DESCRIBED: tl.constexpr,
    b_m: tl.constexpr, b_n: tl.constexpr, b_t: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tile, first, last = _share(p_blocks, pid, whole, splits)
    line = owner(p_lines, _FIELDS, lines, tile).to(tl.int64)
    p_line = p_lines + line * _FIELDS
    p_left, p_right, m, n, stride_lt, stride_lm, stride_rt, stride_rn = listed_factors(
        p_line, LEFT, RIGHT, CONTIGUOUS, ALIGNED
    )
    from_m, from_n = _corner(tile - tl.load(p_line + _FIELDS - 1).to(tl.int32), m, n, b_m, b_n)
    o_t = tl.arange(0, b_t)
    o_m = from_m + tl.arange(0, b_m)
    o_n = from_n + tl.arange(0, b_n)
    m_m = o_m < m
    m_n = o_n < n
    if CONTIGUOUS:
        o_l = o_m[:, None] + o_t[None, :] * stride_lt
        o_r = o_t[:, None] * stride_rt + o_n[None, :]
    else:
        o_l = o_m[:, None].to(tl.int64) * stride_lm + o_t[None, :].to(tl.int64) * stride_lt
        o_r = o_t[:, None].to(tl.int64) * stride_rt + o_n[None, :].to(tl.int64) * stride_rn
    p_words = p_blocks + 1 + slots
    p_own = p_weights + line * units
    acc = tl.zeros((b_m, b_n), tl.float32)
    begins = tl.load(p_words + first, mask=first < last, other=0)
    held = tl.load(p_own + (begins >> UNIT_SHIFT)).to(tl.float32)
    held = tl.where(held == 0.0, 1.0, held)
    full = first
    if DESCRIBED:
        if tl.load(p_blocks) * b_t == tokens:
            full = last
        lefts = tl.make_tensor_descriptor(p_left, [tokens, m], [stride_lt.to(tl.int64), 1], [b_t, b_m])
        rights = tl.make_tensor_descriptor(p_right, [tokens, n], [stride_rt.to(tl.int64), 1], [b_t, b_n])
        for at in range(first, full):
            word, weight, follows = _weights_at(p_words, p_own, at, last)
            # Past the end all is zero.
            start = tl.where(weight == 0.0, tokens, tl.load(p_blocks + 1 + at))
            acc = multiply(lefts.load([start, from_m]).T, rights.load([start, from_n]), acc)
            if (follows != held) & (follows != 0.0):
                acc = acc * (held / follows)
                held = follows
    for at in range(full, last):
        start = tl.load(p_blocks + 1 + at).to(tl.int64)
        word, weight, follows = _weights_at(p_words, p_own, at, last)
        m_t = o_t < tl.where(weight == 0.0, 0, word & COUNT_MASK)
        # [b_m, b_t]
        left = tl.load(p_left + start * stride_lt + o_l, mask=m_m[:, None] & m_t[None, :], other=0.0)
        # [b_t, b_n]
        right = tl.load(p_right + start * stride_rt + o_r, mask=m_t[:, None] & m_n[None, :], other=0.0)
        acc = multiply(left, right, acc)
        if (follows != held) & (follows != 0.0):
            acc = acc * (held / follows)
            held = follows
    total = acc * held
    if pid < whole:
        _add_tile(p_line, o_m, o_n, m_m[:, None] & m_n[None, :], total, CONTIGUOUS, ALIGNED)
    else:
        o_part = tl.arange(0, b_m)[:, None] * b_n + tl.arange(0, b_n)[None, :]
        # [b_m, b_n]
        tl.store(p_parts + (pid - whole).to(tl.int64) * (b_m * b_n) + o_part, total)


@triton.jit(do_not_specialize=["lines", "whole", "splits"])
def add_parts_kernel(
    p_lines, p_parts, lines, whole, splits,
    CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr, b_m: tl.constexpr, b_n: tl.constexpr, b_row: tl.constexpr,
):  # fmt: skip
    rest = tl.program_id(0)
    p_line = p_lines + owner(p_lines, _FIELDS, lines, whole + rest).to(tl.int64) * _FIELDS
    m = tl.load(p_line + 2).to(tl.int32)
    n = tl.load(p_line + 3).to(tl.int32)
    from_m, from_n = _corner(whole + rest - tl.load(p_line + _FIELDS - 1).to(tl.int32), m, n, b_m, b_n)
    o_row = tl.program_id(1) * b_row + tl.arange(0, b_row)
    o_column = tl.arange(0, b_n)
    p_part = p_parts + rest.to(tl.int64) * splits * (b_m * b_n) + o_row[:, None] * b_n + o_column[None, :]
    total = tl.zeros((b_row, b_n), tl.float32)
    for split in range(splits):
        # [b_row, b_n]
        total += tl.load(p_part + split * (b_m * b_n))
    o_m = from_m + o_row
    o_n = from_n + o_column
    _add_tile(p_line, o_m, o_n, (o_m < m)[:, None] & (o_n < n)[None, :], total, CONTIGUOUS, ALIGNED)


@functools.lru_cache(1024)
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


@functools.lru_cache(maxsize=128)
def _launches(
    lefts: MatrixForm,
    rights: MatrixForm,
    outs: MatrixForm,
    wide_lefts: bytes,
    wide_rights: bytes,
    wide_outs: bytes,
    begun: tuple[bool, ...],
    wide_tiles: bool,
) -> list[Launch]:
    kinds: dict[tuple[torch.dtype, torch.dtype, bool, bool], list[int]] = {}
    for i, (m, n) in enumerate(zip(lefts.columns, rights.columns)):
        if m and n:
            (left_row, left_column), (right_row, right_column), (_, out_column) = (
                form.strides[i] for form in (lefts, rights, outs)
            )
            contiguous = left_column == right_column == out_column == 1 and left_row < _NEAR and right_row < _NEAR
            wide_loads = contiguous and bool(wide_lefts[i] and wide_rights[i] and wide_outs[i]) and m % 8 == 0
            kinds.setdefault((lefts.dtypes[i], rights.dtypes[i], contiguous, wide_loads), []).append(i)
    found = []
    for kind, members in kinds.items():
        wide, widths = torch.float32 in kind, [(lefts.columns[i], rights.columns[i]) for i in members]
        tallest, widest = map(max, zip(*widths))
        b_m, b_n = side_tile(tallest, wide), side_tile(widest, wide)
        if not wide and b_m == 128 and wide_tiles and widest >= 256:
            b_n = 256  # reads a quarter fewer bytes for each product, which is what these tiles wait for
        firsts = [0, *itertools.accumulate([-(-m // b_m) * -(-n // b_n) for m, n in widths])]
        lines = [
            (0, 0, *width, *lefts.strides[i], *rights.strides[i], 0, *outs.strides[i], int(begun[i]), first)
            for i, width, first in zip(members, widths, firsts)
        ]
        every, fields = len(members) * _FIELDS.value, _FIELDS.value
        table = Table(lines, *((range(at, every, fields), members) for at in (0, 1, 8)))
        found.append(Launch(*kind, members, b_m, b_n, firsts[-1], table))
    return found


def weighted_sums_(
    outs: Sequence[torch.Tensor],
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    weights: torch.Tensor,
    offsets: torch.Tensor,
    begun: Sequence[bool],
    dealt: tuple[int, int] | None = None,
) -> None:
    """Of k matrices ``outs[i] += sum over units b of weights[i, b] G_ib``.

    ``outs`` float32 [m_i, n_i], any strides, are taken as zero where ``begun`` is False; lefts [N, m_i] and rights [N, n_i]
    float32, bfloat16 or float16, any strides; weights [k, B] float, no two of them more than 2^120 apart but for zeros;
    offsets int64 [B + 1]. One launch for all of the same dtypes and alignment. ``dealt``: whole tiles, and parts of each other
    one, as `deal` has them.
    """
    tokens, device = rights[0].shape[0], rights[0].device
    lefts, rights = Matrices.of(lefts), Matrices.of(rights)
    if (longer := with_wide_rows(lefts)) is not lefts:
        _sums_of_odd_(outs, lefts, longer, rights, weights, offsets, begun, dealt)
        return
    totals = Matrices.of(outs)
    if tokens == 0:
        for total, own in zip(totals, begun):
            if not own:
                total.zero_()
        return
    offsets = to_device_of(offsets, rights[0])
    forms, wides = zip(*((own.form, own.wide) for own in (lefts, rights, totals)))
    for launch in _launches(*forms, *wides, tuple(begun), has_wide_tiles(device)):
        _launch(launch, [lefts, rights, totals], weights, offsets, tokens, dealt)


def _sums_of_odd_(
    outs: Sequence[torch.Tensor],
    lefts: Sequence[torch.Tensor],
    longer: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    weights: torch.Tensor,
    offsets: torch.Tensor,
    begun: Sequence[bool],
    dealt: tuple[int, int] | None,
) -> None:
    """The sums where some lefts were padded to a readable width: theirs go through sums that are as much wider."""
    odd = [i for i, left in enumerate(longer) if left is not lefts[i]]
    wider = list(outs)
    for i in odd:
        wider[i] = outs[i].new_empty(longer[i].shape[1], outs[i].shape[1])
    fresh = [own and i not in odd for i, own in enumerate(begun)]
    weighted_sums_(wider, longer, rights, weights, offsets, fresh, dealt=dealt)
    for i in odd:
        total = wider[i][: outs[i].shape[0]]
        outs[i].add_(total) if begun[i] else outs[i].copy_(total)


def _launch(
    launch: Launch,
    matrices: Sequence[Matrices],
    weights: torch.Tensor,
    offsets: torch.Tensor,
    tokens: int,
    dealt: tuple[int, int] | None,
) -> None:
    """Sums of the matrices of one launch; ``matrices`` are lefts, rights and sums."""
    members, b_m, b_n, units = launch.members, launch.b_m, launch.b_n, offsets.shape[0] - 1
    device, wide = offsets.device, torch.float32 in (launch.of_left, launch.of_right)
    b_t = row_tile(tokens, units, 32 if wide else 64)
    large = b_m * b_n > 4096
    most = max(1, tokens // _SHORTEST_PART)
    whole, splits = dealt or deal(launch.tiles, (1 if large else 4) * multiprocessors(device), most)
    rest = launch.tiles - whole
    blocks, slots = blocks_of(offsets, tokens, b_t)
    parts = torch.empty(max(1, rest * splits * b_m * b_n), dtype=torch.float32, device=device)
    table = launch.table.on_device_of(parts, *(own.addresses for own in matrices))
    own = weights if len(members) == len(matrices[0]) else weights[indices_on_device(members, parts)]
    kind: dict[str, Any] = {"CONTIGUOUS": launch.contiguous, "ALIGNED": launch.wide_loads, "b_m": b_m, "b_n": b_n}
    with on_device_of(parts):
        _weighted_kernel[(whole + rest * splits,)](
            table, blocks, own.contiguous(), parts, units, len(members), slots, whole, splits, tokens,
            LEFT=TRITON_DTYPES[launch.of_left], RIGHT=TRITON_DTYPES[launch.of_right],
            DESCRIBED=b_t == 64 and enable_descriptors(launch, [own.form for own in matrices[:2]], device),
            **kind, b_t=b_t,
            enable_fp_fusion=True, num_warps=8 if large else 4,
            # The table is read two blocks before the factors it points to, these two before their product, or four.
            num_stages=stages_of(7 if b_n == 256 else 5, device),
        )  # fmt: skip
        if rest:
            b_row = min(b_m, max(1, 2048 // b_n))
            add_parts_kernel[(rest, -(-b_m // b_row))](
                table, parts, len(members), whole, splits, **kind, b_row=b_row, num_warps=4
            )
