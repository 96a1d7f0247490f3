"""Roundings that float32 leaves open are settled by a launch of their own: any number of them, and NaN where its list is full."""

import math

import pytest
import torch
import triton.language as tl
from fastdp.kernels import adamw, grid, settle
from fastdp.kernels.clip import clip_noise
from fastdp.kernels.noise import add_noise_

from fastdp import ops
from fastdp.ops.grid import on_grid


def position(rounds=20):
    return ops.NoiseStream.unsafe_reproducible(5, rounds).at(7, 1).take()


def leave_open(monkeypatch, share, room=lambda n: n):
    """Float32 leaves about this share of roundings for std 0.7 open, and lists have so much room."""
    monkeypatch.setattr(grid, "ERROR", tl.constexpr(share / 2 / 22.4))
    monkeypatch.setattr(settle, "capacity_of", room)
    for module in (settle, adamw):  # hundreds of entries: the interpreter takes as long for a program of one
        monkeypatch.setattr(module, "SETTLE_BLOCK", 256)


@pytest.mark.parametrize(
    ("dtype", "n", "first", "rounds"),
    [
        (torch.float32, 1, 0, 20),
        (torch.float32, 2061, 0, 20),
        (torch.float32, 300, 0, 12),
        (torch.bfloat16, 300, 4099, 20),
        (torch.float16, 300, 4099, 20),
    ],
)
def test_sums(dtype, n, first, rounds, monkeypatch):
    x = (3 * torch.randn(n)).to(dtype)
    x[::50] = float("inf")
    few, got = x.clone(), x.clone()
    add_noise_(few, 0.7, position(rounds), True, first)
    leave_open(monkeypatch, 0.1)
    add_noise_(got, 0.7, position(rounds), True, first)
    assert torch.equal(got, few)
    # The interpreter rounds to bfloat16 in a way of its own.
    assert dtype == torch.bfloat16 or torch.equal(got, on_grid(x, 0.7, position(rounds), first).to(dtype))


def test_clipped_rows(monkeypatch):
    leave_open(monkeypatch, 0.1)
    x = 0.01 * torch.randn(5, 129)  # not clipped, so that both round the same numbers
    assert torch.equal(clip_noise(x, 10.0, 0.7, position(), True)[0], on_grid(x, 0.7, position()))


def updated(params, moments, masters, axes, rounds=20):
    """Copies of everything after an update with rounded noise: several tensors, tails among them."""
    shapes = [(3,), (2049,), (0,), (5, 2, 7)]
    generator = torch.Generator().manual_seed(1)
    made = [[torch.rand(shape, generator=generator) for shape in shapes] for _ in range(4)]
    tensors = [[x.to(dtype) for x in own] for own, dtype in zip(made, (params, torch.float32, moments, moments))]
    tensors.append([x.clone() for x in made[0]] if masters else [])
    counts = ((3, 2049, 0, 5), (1, 1, 1, 14))
    scales = [[torch.rand(k, generator=generator) + 0.1 for k in own] for own in counts] if axes else [[], []]
    numbers = (0.7, 8.0, 0.1, 0.9, 0.999, 1e-8, 0.01, 3, True)
    drawn = ops.NoiseStream.unsafe_reproducible(4, rounds).take_at(2, range(4))
    before = [[x.clone() for x in own] for own in tensors]
    adamw.adamw_noise_steps_(*tensors, drawn, *numbers, *scales)
    assert all(map(torch.equal, before[1], tensors[1]))
    return before, tensors


UPDATES = [
    (torch.float32, torch.float32, False, True),
    (torch.bfloat16, torch.float32, True, False),
    (torch.bfloat16, torch.bfloat16, False, False),
    (torch.float16, torch.bfloat16, True, True),
    (torch.float32, torch.float32, False, False, 12),
]


@pytest.mark.parametrize("update", UPDATES)
def test_an_update_does_not_depend_on_what_is_left_open(update, monkeypatch):
    _, expected = updated(*update)
    leave_open(monkeypatch, 0.1)
    _, got = updated(*update)
    assert all(torch.equal(a, b) for own, other in zip(got, expected) for a, b in zip(own, other))


def test_sums_beyond_the_list_stay_nan(monkeypatch):
    leave_open(monkeypatch, 0.05, lambda n: 3)
    x = torch.randn(2061)
    got = x.clone()
    add_noise_(got, 0.7, position(), True)
    expected, lost = on_grid(x, 0.7, position()), got.isnan()
    assert torch.equal(got[~lost], expected[~lost])
    assert 50 < int(lost.sum()) < 200
    # Without any room, all that is open: three blocks were settled.
    monkeypatch.setattr(settle, "capacity_of", lambda n: 0)
    none = x.clone()
    add_noise_(none, 0.7, position(), True)
    settled = none.isnan() & ~lost
    assert bool((lost <= none.isnan()).all())
    assert settled.nonzero().div(16, rounding_mode="floor").unique().numel() == 3


@pytest.mark.parametrize("update", UPDATES[1:3])
def test_where_a_list_is_full_what_is_on_it_becomes_nan(update, monkeypatch):
    """What is not on it stays as it was; nothing is updated wrongly."""
    _, expected = updated(*update)
    leave_open(monkeypatch, 0.05, lambda n: 3)
    before, got = updated(*update)
    lost, kept, blocks = 0, 0, set()
    # Parameters that have masters are these, rounded by the interpreter.
    states = [own for own in zip(before, got, expected) if own[0]][1 if update[2] else 0 :]
    for i, param in enumerate(got[0]):
        nan = param.isnan()
        lost += int(nan.sum())
        blocks |= {(i, int(at) // 16) for at in nan.flatten().nonzero()}
        others = torch.stack([(now[i] == then[i]).flatten() for _, now, then in states]).all(0).view_as(nan)
        same = torch.stack([(now[i] == own[i]).flatten() for own, now, _ in states]).all(0).view_as(nan)
        assert bool((nan | others | same).all())
        assert not bool((nan & same).any())
        kept += int((same & ~others).sum())
    assert len(blocks) == 3
    assert 3 <= lost <= 8
    assert 50 < kept < 200


def test_lists_are_long_enough():
    """What `capacity_of` says of the probability that one is not, with the bound that kernels have."""
    share = 4 * 32 * grid.ERROR.value + 0.4 * 2.0**-13 + 2.0**-32
    assert share <= 7.5e-4
    for n in (1, 1000, *range(10**5, 2 * 10**6, 997), 10**9):
        mean, most = 7.5e-4 * n, settle.capacity_of(n)
        assert most > mean
        assert most * math.log(most / mean) - most + mean >= 180 * math.log(2)


def test_few_roundings_are_open(monkeypatch):
    monkeypatch.setattr(settle, "capacity_of", lambda n: 0)
    x = torch.randn(1 << 15)
    add_noise_(x, 0.7, position(), True)
    # 2 * 22.4 * 5.4e-6 of 32,768 are 7.9 on average.
    assert 1 <= int(x.isnan().sum()) <= 16
