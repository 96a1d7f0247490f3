"""Noised sums rounded to a grid: every implementation gives the definition's numbers, and these give no sum away."""

import decimal
import math
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats

from fastdp import _native
from fastdp.ops import NoiseStream, adamw_noise_step_, add_noise_, clip_noise
from fastdp.ops.grid import DISTANCE, exact_normal, grid, on_grid
from fastdp.ops.noise import standard_normals
from fastdp.ops.stream import CIPHER_ROUNDS
from fastdp.ops.table import OPS
from tests.cases import cases, pairs
from tests.ops.noise_paths import open_sums


def position(seed: int = 1, rounds: int = 20) -> torch.Tensor:
    return NoiseStream.unsafe_reproducible(seed, rounds).at(0, 0).take()


def steps(x: torch.Tensor, std: float) -> np.ndarray:
    """``x`` in steps of the grid, which it must lie on."""
    found = x.double().numpy() / grid(std)[0]
    assert (found == np.rint(found)).all()
    return found


@given(st.floats(2.0**-100, 2.0**100))
def test_grid_is_the_power_of_two_that_it_should_be(std):
    spacing, ratio = grid(std)
    assert math.frexp(spacing)[0] == 0.5
    assert 16 <= ratio < 32
    assert ratio == np.float32(ratio)
    assert std <= ratio * spacing <= std * (1 + 2.0**-23), "less noise than was asked for"


# Elements of unsafe_reproducible(0).at(0, 0) whose radius word begins with 16 zero bits, one of them with 32.
TAILS = [(904716998, 6), (481321075, 7), (600722903, 3), (324306011, 0), (71500421, 6)]


def test_exact_normals_have_98_bits():
    ordinary = [(position(rounds=rounds), i) for i in range(24) for rounds in CIPHER_ROUNDS]
    tails = [*((20, block, k) for block, k in TAILS), (12, 123700073, 0)]
    far = [(position(0, rounds), 16 * block + k + half) for rounds, block, k in tails for half in (0, 8)]
    with decimal.localcontext() as context:
        context.prec = 60
        for at, index in ordinary + far:
            truth = exact_normal(at, index)
            high, low = _native.exact_normal(at.data_ptr(), index)
            assert abs(Decimal(high) + Decimal(low) - truth) <= Decimal(2) ** -98 * abs(truth)


def test_exact_normals_continue_those_of_float32():
    """The same words stand first in both, so rounding leaves the noise as it was."""
    z = standard_normals(position(), 64)
    exact = [float(exact_normal(position(), i)) for i in range(64)]
    assert (z - torch.tensor(exact, dtype=torch.float64)).abs().max() < 1e-7


@cases(*pairs(("size", [0.0, 1e-30, 1e-3, 1.0, 1e6, 1e20]), ("std", [1e-12, 0.7, 1.0, 3e9])))
def test_released_numbers_are_the_definitions(std, size):
    x = size * torch.randn(1503, generator=torch.Generator().manual_seed(1))
    expected = on_grid(x, std, position())
    x_before = x.clone()
    OPS["add_noise_"](x, std, position(), True)
    assert torch.equal(x, expected)
    steps(x, std)
    z = standard_normals(position(), x.numel())
    # half a step of rounding, and that of float32 where the sum is far larger than the noise
    bound = (0.5 + 1e-6) * grid(std)[0] + 2.0**-24 * x.abs()
    assert ((x.double() - x_before.double() - grid(std)[0] * grid(std)[1] * z).abs() <= bound).all()


@cases("std, rounds", [(0.7, 20), (1.9, 20), (0.7, 12)])
def test_sums_beside_the_middle_of_the_grid_are_rounded_right(std, rounds):
    """Chosen so that float32 normals decide none of them, and the middle is up to 2^-40 steps away."""
    n = 1 << 9
    at = position(rounds=rounds)
    x = open_sums(at, n, std)
    truth = on_grid(x, std, at)
    OPS["add_noise_"](x, std, at, True)
    assert torch.equal(x, truth)


def test_released_numbers_follow_the_rounded_gaussian():
    """Chi-square against Phi, at sums on the grid, beside it and between: fails for 4 keys in 10^6."""
    std, n = 1.0, 1 << 20
    spacing, ratio = grid(std)
    for number, fraction in enumerate((0.0, 2.0**-20, 0.25, 0.5)):
        x = torch.full((n,), fraction * spacing)
        OPS["add_noise_"](x, std, position(50 + number), True)
        found = steps(x, std)
        bounds = (np.arange(-64, 65) - 0.5 - fraction) / ratio
        expected = n * np.diff(np.concatenate([[0.0], stats.norm.cdf(bounds), [1.0]]))
        observed = np.bincount(np.clip(found, -65, 64).astype(int) + 65, minlength=130)
        assert stats.chisquare(observed, expected).pvalue > 1e-6


def test_the_sum_cannot_be_seen_in_the_gaps():
    """The attack: a released number that is not ``float(std * z)`` for any z was not noise on an exact zero.

    Plain noise gives it away; on the grid, what one sum can become every other can. Sums 0 and .4 steps, 2^18 draws of
    each: apart from the rarest, the same numbers, and as often up to the shift.
    """
    std, n = 0.9, 1 << 18
    spacing = grid(std)[0]
    zero = add_noise_(torch.zeros(n), std, NoiseStream.unsafe_reproducible(1), secure_rounding=True)
    other = add_noise_(torch.full((n,), 0.4 * spacing), std, NoiseStream.unsafe_reproducible(2), secure_rounding=True)
    steps(zero, std), steps(other, std)
    common = set(zero.tolist()) & set(other.tolist())
    inside = torch.tensor([abs(v) < 3 * std for v in zero.tolist()])
    assert set(zero[inside].tolist()) <= common
    plain_zero = add_noise_(torch.zeros(n), std, NoiseStream.unsafe_reproducible(1))
    plain_other = add_noise_(torch.full((n,), 0.4 * spacing), std, NoiseStream.unsafe_reproducible(2))
    assert len(set(plain_zero.tolist()) & set(plain_other.tolist())) < n / 10, (
        "plain noise does not leak: drop the test"
    )


def test_clipped_rows_and_adamw_release_grid_numbers_alone():
    x = torch.randn(50, 300, generator=torch.Generator().manual_seed(3))
    for rows in (x, x.reshape(-1, 5)):
        steps(clip_noise(rows, 1.0, 0.3, NoiseStream(), secure_rounding=True), 0.3)
    for dtype in (torch.bfloat16, torch.float16):
        low = clip_noise(x.to(dtype), 1.0, 0.3, NoiseStream.unsafe_reproducible(4), secure_rounding=True)
        full = clip_noise(x.to(dtype).float(), 1.0, 0.3, NoiseStream.unsafe_reproducible(4), secure_rounding=True)
        assert torch.equal(low, full.to(dtype)), "rounding to the dtype is all that may follow"
    # with beta1 = 0 the first moment is the noised mean itself
    mean, square = torch.zeros(999), torch.zeros(999)
    total = torch.randn(999, generator=torch.Generator().manual_seed(4))
    adamw_noise_step_(
        torch.zeros(999),
        *(total, mean, square, 0.3, NoiseStream()),
        **{"divisor": 4.0, "lr": 0.1, "betas": (0.0, 0.9), "step": 1, "secure_rounding": True},
    )
    steps(4 * mean, 0.3)


def test_special_sums_pass_through_and_zero_std_changes_nothing():
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38])
    got = add_noise_(special.clone(), 1e-9, NoiseStream(), secure_rounding=True)
    assert torch.equal(got.nan_to_num(7.0), special.nan_to_num(7.0))
    x = torch.tensor([0.1, -0.3])
    assert torch.equal(add_noise_(x.clone(), 0.0, NoiseStream(), secure_rounding=True), x)


@cases("std", [2.0**-101, 2.0**101])
def test_noise_beyond_the_grid_is_refused(std):
    x, stream = torch.zeros(3, 3), NoiseStream()
    calls = [
        lambda: add_noise_(x, std, stream, secure_rounding=True),
        lambda: clip_noise(x, 1.0, std, stream, secure_rounding=True),
        lambda: adamw_noise_step_(x, x, x, x, std, stream, divisor=1.0, lr=0.1, step=1, secure_rounding=True),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="2\\^-100"):
            call()


def test_the_stated_distance_covers_the_arithmetic():
    """A number is rounded wrongly only within the error of the last arithmetic: 2^-98 of a value of at most 2^9 steps."""
    assert DISTANCE >= 2 * 2.0**-98 * 2**9
