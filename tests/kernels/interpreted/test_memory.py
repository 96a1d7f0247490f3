"""Kernels stay inside what they were given, and no program depends on another of its launch: whatever the order, the same bits.

Factors and results end, or begin, where a page begins that may not be touched: a read or write beyond them ends this process.
"""

import ctypes
import mmap
import random

import pytest
import torch
from fastdp.kernels import bounds, direct, gram, grouped, groups, onehot, sums, weighted
from fastdp.kernels.adamw import adamw_noise_steps_
from fastdp.kernels.noise import add_noise_
from triton.runtime import interpreter

from fastdp.ops import NoiseStream
from fastdp.ops.factors import ABSOLUTE, MASKED_SQUARE, SQUARE
from tests.ops.uses import factor, offsets_of

_LIBC = ctypes.CDLL(None, use_errno=True)
_held: list[mmap.mmap] = []


def guarded(tensor, at_end):
    """A contiguous copy whose last (or first) byte is beside a page without access."""
    pages = -(-tensor.nbytes // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    _held.append(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + (pages + 1) * mmap.PAGESIZE):
        assert _LIBC.mprotect(ctypes.c_void_p(guard), mmap.PAGESIZE, 0) == 0  # 0: no access
    first = mmap.PAGESIZE + (pages * mmap.PAGESIZE - tensor.nbytes if at_end else 0)
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=first)
    return copy.view(tensor.dtype).view(tensor.shape).copy_(tensor)


@pytest.fixture
def in_order(monkeypatch):
    """Sets the order that the programs of a launch run in: ``plain``, ``reversed`` or ``random``."""
    builder, chosen = interpreter.interpreter_builder, {}
    set_index, set_size = builder.set_grid_idx, builder.set_grid_dim

    def size(*grid):
        chosen["grid"] = grid
        cells = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
        others = list(reversed(cells)) if chosen["order"] == "reversed" else random.Random(0).sample(cells, len(cells))
        chosen["map"] = dict(zip(cells, others if chosen["order"] != "plain" else cells))
        set_size(*grid)

    monkeypatch.setattr(builder, "set_grid_dim", size)
    monkeypatch.setattr(builder, "set_grid_idx", lambda *at: set_index(*chosen["map"][at]))

    def begin(order):
        chosen["order"] = order

    return begin


def position():
    return NoiseStream.unsafe_reproducible(3).at(1, 2).take()


def given(at_end, dtype):
    lengths = (5, 0, 33, 20)
    offsets = guarded(offsets_of(lengths), at_end)
    left, right = (guarded(factor(58, width, width, dtype), at_end) for width in (19, 37))
    ids = guarded(torch.randint(0, 6, (58,), generator=torch.Generator().manual_seed(0)), at_end)
    weights, others = guarded(torch.tensor([0.5, 1.0, 0.0, 0.3]), at_end), guarded(torch.rand(4), at_end)
    mask = guarded(torch.rand(19, 37) < 0.5, at_end)
    return offsets, left, right, ids, weights, others, mask


def run_all(at_end, dtype):
    """Every launcher's results on guarded memory."""
    offsets, left, right, ids, weights, others, mask = given(at_end, dtype)
    results = [
        *gram.gram_norms([left, right], [right, left], [1, 1], offsets, programs=5),
        direct.direct_norms(left, right, offsets, SQUARE),
        direct.direct_norms(left, right, offsets, ABSOLUTE),
        direct.direct_norms(left, right, offsets, MASKED_SQUARE, mask),
        *bounds.row_products(left, right, offsets, 2),
        *bounds.row_products(ids, right, offsets, 1),
        bounds.token_counts([left], [right], offsets),
        onehot.onehot_norms(ids, right, offsets, SQUARE),
        *grouped.per_unit_group([left], [right], offsets)[0],
        groups.instance_norms_group([left.float()]),
        *groups.instance_sum_group([left[:4].float()], weights[None]),
    ]
    for options in ((), (others, mask)):
        out = guarded(torch.zeros(19, 37), at_end)
        if options:
            sums.weighted_sum_(out, left, right, weights, *options, offsets)
        else:
            weighted.weighted_sums_([out], [left], [right], weights[None], offsets, [True], dealt=(0, 2))
        table = guarded(torch.zeros(19, 37), at_end)
        spread = [each.repeat_interleave(offsets.diff()) for each in (weights, *options[:1])]
        onehot.onehot_weighted_sum_(table, ids, right, *spread, *options[1:])
        results += [out, table]
    param, mean, square = (guarded(torch.ones(1, 19 * 37), at_end) for _ in range(3))
    noisy = guarded(torch.ones(19, 37, dtype=dtype), at_end)
    add_noise_(noisy, 1.0, position(), False)
    state = [param], [out.view(1, -1)], [mean], [square], [], position()[None]
    adamw_noise_steps_(*state, 1.0, 8.0, 1e-3, 0.9, 0.99, 1e-8, 0.1, 1, False, [], [])
    return [*results, noisy, param, mean, square]


@pytest.mark.parametrize(
    ("dtype", "order", "at_end"), [(torch.float32, "reversed", False), (torch.bfloat16, "random", True)]
)
def test_nothing_beyond_the_arguments_is_touched_and_no_program_waits_for_another(in_order, dtype, order, at_end):
    found = []
    for own, end in (("plain", True), (order, at_end)):
        in_order(own)
        torch.manual_seed(0)
        found.append(run_all(end, dtype))
    assert all(map(torch.equal, *found))
