"""Noise: its definition, every implementation of it, and its law."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats

from fastdp import _native, ops
from fastdp.ops import NoiseStream
from fastdp.ops.grid import on_grid
from fastdp.ops.noise import normal_parts, standard_normals
from fastdp.ops.stream import CIPHER_ROUNDS
from fastdp.ops.table import OPS
from tests.cases import cases, pairs
from tests.ops import noise_paths
from tests.ops.noise_paths import DTYPES, NORMAL_ERROR, PATHS, run_path
from tests.ops.uses import by_threads

#: Float32 noise as it is, not rounded to a grid (that has tests of its own).
add_noise_ = partial(ops.add_noise_, secure_rounding=False)


def native_normals(at: torch.Tensor, n: int, isa: str, first: int = 0, threads: int = 1):
    out = np.full(n + 16, np.nan, np.float32)
    _native.noise_normals(out.ctypes.data, first, n, at.data_ptr(), threads, isa)
    assert np.isnan(out[n:]).all(), "wrote past the end"
    return out[:n]


def position(seed: int = 1, step: int = 0, tensor: int = 0, rounds: int = 20) -> torch.Tensor:
    return NoiseStream.unsafe_reproducible(seed, rounds).at(step, tensor).take()


@cases(*pairs(("isa", PATHS), ("rounds", CIPHER_ROUNDS), ("n", [0, 1, 7, 129, 257 * 123, 1 << 18])))
def test_normals_are_those_of_the_definition(isa, n, rounds):
    at = position(rounds=rounds)
    truth = standard_normals(at, n).numpy()
    z = native_normals(at, n, isa)
    assert not np.isnan(z).any()
    assert (np.abs(z - truth) <= NORMAL_ERROR * np.abs(truth)).all()


def test_avx_paths_agree_to_the_bit():
    if len(PATHS) < 3:
        pytest.skip("needs AVX-512")
    np.testing.assert_array_equal(
        native_normals(position(), 1 << 18, "avx2").view(np.uint32),
        native_normals(position(), 1 << 18, "avx512").view(np.uint32),
    )


# Positions found by search: (block, word k, w[k], rounds) of unsafe_reproducible(0, rounds).at(0, 0), whose top 16 bits are zero.
WIDE = [
    *((904716998, 6, 0, 20), (481321075, 7, 1, 20), (600722903, 3, 1, 20), (324306011, 0, 4, 20), (71500421, 6, 7, 20)),
    (123700073, 0, 1, 12),
]


@cases(*pairs(("isa", PATHS), ("block, k, word, rounds", WIDE)))
def test_radius_words_without_top_bits_are_widened(isa, block, k, word, rounds):
    at = position(0, rounds=rounds)
    w, v = np.empty((1, 16), np.uint32), np.empty((1, 16), np.uint32)
    _native.chacha_words(w.ctypes.data, block, 1, at.data_ptr(), 1, isa)
    at[8] |= -(1 << 31)
    _native.chacha_words(v.ctypes.data, block, 1, at.data_ptr(), 1, isa)
    assert w[0, k] == word
    u = (word * 2.0**32 + float(v[0, k]) + 0.5) / 2.0**64
    radius = math.sqrt(-2 * math.log(u))
    z = native_normals(position(0, rounds=rounds), 16, isa, first=16 * block)
    assert math.hypot(z[k], z[k + 8]) == pytest.approx(radius, rel=4 * NORMAL_ERROR)
    unwidened = math.sqrt(-2 * math.log((word + 0.5) / 2.0**32))
    assert radius != pytest.approx(unwidened, rel=1e-4)
    assert radius > 6.2


def test_tail_reaches_beyond_nine_sigma():
    """The definition on forced words: without the second word no radius could pass 6.76."""
    word = np.zeros(4, np.uint32)
    second = np.array([1 << 30, 1 << 20, 1 << 10, 0], np.uint32)
    radius, _ = normal_parts(word, second, np.zeros(4, np.uint32))
    np.testing.assert_allclose(radius**2 / -2, np.log((second + 0.5) / 2.0**64), rtol=1e-12)
    assert radius[0] > 6.8
    assert (np.diff(radius) > 0).all()
    assert radius[3] == pytest.approx(math.sqrt(130 * math.log(2)))
    assert radius[3] > 9.49


def test_radius_is_accurate_near_zero():
    """Words next to 2^32 give a small radius, where 1 - u must not be taken from a rounded u."""
    word = np.array([0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFF00, 0x80000000, 0x7FFFFFFF], np.uint32)
    radius, _ = normal_parts(word, np.zeros(5, np.uint32), np.zeros(5, np.uint32))
    missing = [(2**32 - int(w) - 0.5) / 2**32 for w in word]
    np.testing.assert_allclose(radius, [math.sqrt(-2 * math.log1p(-m)) for m in missing], rtol=1e-14)


@pytest.mark.parametrize("isa", PATHS)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6))
def test_noise_does_not_depend_on_how_it_is_cut(isa, pieces):
    whole = native_normals(position(), sum(pieces), isa)
    starts = np.cumsum([0, *pieces[:-1]]).tolist()
    parts = [native_normals(position(), n, isa, first) for first, n in zip(starts, pieces)]
    np.testing.assert_array_equal(np.concatenate(parts).view(np.uint32), whole.view(np.uint32))


def test_threads_do_not_change_the_result():
    """Of rows that are no multiple of a vector, in blocks that threads share."""
    x, more = torch.randn(7, 3001), [torch.rand(7, 3001) for _ in range(3)]

    def compute():
        clipped = ops.clip_noise(x, 2.5, 0.7, NoiseStream.unsafe_reproducible(1))
        own, at = [value.clone() for value in (x, *more)], NoiseStream.unsafe_reproducible(2)
        ops.adamw_noise_step_(*own, 0.7, at, divisor=32.0, lr=1e-2, step=3)
        return torch.cat([clipped, ops.add_noise_(x.clone(), 0.7, at), *own])

    by_threads(compute)


@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_strides_do_not_move_the_noise(shape, seed, dtype, data):
    order = data.draw(st.permutations(range(len(shape))))
    steps = [slice(None, None, data.draw(st.integers(1, 2))) for _ in shape]
    base = torch.zeros([size * (s.step or 1) for size, s in zip(shape, steps)], dtype=dtype)
    view = base.permute(order)[tuple(steps[i] for i in order)]
    plain = torch.zeros(view.shape, dtype=dtype)
    add_noise_(view, 1.0, NoiseStream.unsafe_reproducible(seed))
    add_noise_(plain, 1.0, NoiseStream.unsafe_reproducible(seed))
    assert torch.equal(view, plain)
    assert int((base != 0).sum()) == int((plain != 0).sum()), "wrote outside the view"


def test_low_precision_noise_is_float32_noise_rounded_once():
    """Trap: noise sampled in bf16 has 8 bits of its own; here only the sum is rounded."""
    exact = add_noise_(torch.zeros(10_000), 1.0, NoiseStream.unsafe_reproducible(4))
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.full((10_000,), 1.0, dtype=dtype)
        add_noise_(x, 1.0, NoiseStream.unsafe_reproducible(4))
        assert torch.equal(x, (exact + 1.0).to(dtype))


def test_special_values_pass_through():
    for dtype in DTYPES:
        x = torch.tensor([float("nan"), float("inf"), -float("inf"), torch.finfo(dtype).max], dtype=dtype)
        y = add_noise_(x.clone(), 1e-9, NoiseStream())
        assert torch.equal(torch.nan_to_num(x, nan=7.0), torch.nan_to_num(y, nan=7.0))


@cases(*pairs(("isa", PATHS), ("dtype", DTYPES[1:])))
def test_half_precision_round_trip_is_exact(isa, dtype):
    """Every bfloat16 and float16, subnormals and infinities among them, survives noise of a vanishing size."""
    before = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    after = torch.from_numpy(run_path(isa)[f"bits-{DTYPES.index(dtype)}"]).view(dtype).float()
    assert torch.equal(before.isnan(), after.isnan())
    assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))


@cases(*pairs(("isa", PATHS), ("std", [30000.0, 1e-6])))
def test_half_precision_rounds_to_nearest_into_overflow_and_subnormals(isa, std):
    """Noise alone, against the definition rounded by torch: equal but where float32's own error crosses a tie."""
    z = standard_normals(noise_paths.position(), 1 << 16)
    expected = (z * std).half()
    found = torch.from_numpy(run_path(isa)[f"alone-{std:g}"]).view(torch.float16)
    steps = (expected.view(torch.int16).int() - found.view(torch.int16).int()).abs()
    if std > 1:
        assert int(expected.isinf().sum()) > 1000
    assert int(steps.max()) <= 1
    # a float32 value lies within its own error of a tie of float16, 2^13 times coarser, about once in 4,000
    assert int(steps.count_nonzero()) < 100


def test_zero_std_changes_nothing_and_still_claims():
    stream, other = NoiseStream.unsafe_reproducible(5), NoiseStream.unsafe_reproducible(5)
    x = torch.tensor([1.0, -0.0])
    add_noise_(x, 0.0, stream)
    assert x.tolist() == [1.0, 0.0]
    other.take()
    assert torch.equal(stream.take(), other.take())


@cases("first, match", [(-1, "counted from 0"), (1.0, "counted from 0"), (1 << 36, "2.36|2.35")])
def test_a_piece_beyond_the_position_is_refused(first, match):
    with pytest.raises(ValueError, match=match):
        add_noise_(torch.zeros(3), 1.0, NoiseStream.unsafe_reproducible(8), first=first)


@cases("std", [-1.0, float("nan"), float("inf"), torch.tensor(1.0), "1"])
def test_bad_std_is_refused_before_anything_is_drawn(std):
    stream, x = NoiseStream.unsafe_reproducible(7), torch.zeros(3)
    with pytest.raises(ValueError, match="std must be a finite number of at least 0"):
        add_noise_(x, std, stream)
    assert not x.any()
    assert torch.equal(stream.take(), NoiseStream.unsafe_reproducible(7).take())


def test_a_sparse_tensor_is_refused():
    with pytest.raises(TypeError, match="dense tensor"):
        add_noise_(torch.zeros(3).to_sparse(), 1.0, NoiseStream())


def test_too_large_tensors_are_refused():
    big = torch.empty(1, device="meta").as_strided(((1 << 35) + 1,), (1,))
    with pytest.raises(ValueError, match=r"2\^35"):
        OPS["add_noise_"].check(big, 1.0, position(), True)
    with pytest.raises(ValueError, match=r"2\^36"):
        OPS["add_noise_"].check(
            torch.empty(1, device="meta").as_strided(((1 << 36) + 1,), (1,)), 1.0, position(), False
        )


def test_torchs_generator_is_no_stream():
    with pytest.raises(TypeError, match="must be a NoiseStream"):
        add_noise_(torch.zeros(3), 1.0, torch.Generator())


@cases("double_rounds", [0, 1, 4, 8, 12, 20, -6, 6 - (1 << 31)])
def test_positions_of_other_rounds_are_refused(double_rounds):
    at, one = position(), torch.ones(1)
    at[11] = double_rounds
    steps = {"divisor": 1.0, "lr": 0.1, "step": 1}
    draws = [
        lambda: OPS["add_noise_"](torch.zeros(3), 1.0, at, False),
        lambda: torch.ops.fastdp.add_noise_(torch.zeros(3), 1.0, at, True),
        lambda: ops.adamw_noise_steps_([one], [one], [one], [one], 1.0, at[None], **steps),
        lambda: OPS["private_snap"](torch.zeros(1, dtype=torch.int64), torch.eye(3), one.double(), at),
        lambda: native_normals(at, 16, ""),
        lambda: standard_normals(at, 3),
        lambda: on_grid(one, 1.0, at),
    ]
    for draw in draws:
        with pytest.raises(ValueError, match="double rounds"):
            draw()
    assert one == 1


def test_one_call_has_one_number_of_rounds():
    pair = [torch.ones(1), torch.ones(1)]
    drawn = torch.stack([position(), position(tensor=1, rounds=12)])
    with pytest.raises(ValueError, match=r"for all, or 6, not \[6, 10\]"):
        ops.adamw_noise_steps_(pair, pair, pair, pair, 1.0, drawn, divisor=1.0, lr=0.1, step=1)


def test_autograd_notices_the_write():
    x = torch.ones(3)
    w = torch.ones(3, requires_grad=True)
    y = (w * x).sum()
    add_noise_(x, 1.0, NoiseStream())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_compiled_code_draws_anew_on_every_call():
    """A traced function must not bake a position in: the same noise twice would be no noise."""
    stream, twin = NoiseStream.unsafe_reproducible(8), NoiseStream.unsafe_reproducible(8)

    @torch.compile(backend="eager")
    def noised(x):
        return add_noise_(x * 2, 1.0, stream)

    for _ in range(4):
        assert torch.equal(noised(torch.ones(6)), add_noise_(torch.full((6,), 2.0), 1.0, twin))


# The law, on fixed keys: a correct generator fails each test below for the stated share of keys.


def test_normality():
    """Kolmogorov-Smirnov on 2^20 draws, whole and each half of the blocks: fails for 3 keys in 10^5."""
    z = native_normals(position(11), 1 << 20, "")
    for part in (z, z.reshape(-1, 16)[:, :8].ravel(), z.reshape(-1, 16)[:, 8:].ravel()):
        assert stats.kstest(part, "norm").pvalue > 1e-5


def correlations(a: np.ndarray, b: np.ndarray) -> list[float]:
    """z-scores of the correlation of the values and of their squares."""
    n = a.size
    return [float(np.corrcoef(x, y)[0, 1]) * math.sqrt(n) for x, y in ((a, b), (a**2, b**2))]


def test_independence_of_streams_steps_tensors_and_neighbours():
    """Correlation of values and of squares over 2^18 pairs, 22 scores with |z| < 5.5: fails for 1 key in 10^6."""
    n = 1 << 18
    base = native_normals(position(21, 5, 9), n, "")
    others = {
        "stream": position(22, 5, 9),
        "step": position(21, 6, 9),
        "high step": position(21, 5 | 1 << 32, 9),
        "tensor": position(21, 5, 10),
        "serial": NoiseStream.unsafe_reproducible(21).take(),
    }
    scores = {name: correlations(base, native_normals(at, n, "")) for name, at in others.items()}
    scores |= {f"lag {lag}": correlations(base[:-lag], base[lag:]) for lag in (1, 7, 8, 16, 256)}
    halves = base.reshape(-1, 16)
    scores["pair"] = correlations(halves[:, :8].ravel(), halves[:, 8:].ravel())
    assert len(scores) == 11
    for name, pair in scores.items():
        assert max(map(abs, pair)) < 5.5, name


@pytest.mark.slow
def test_tails_over_two_to_the_32_draws():
    """Counts beyond 4 to 6.5 sigma against the exact law, two-sided Poisson: fails for 6 keys in 10^6.

    A radius of 32 bits stops at 6.76 sigma and one of 24 bits at 5.77; a Kolmogorov-Smirnov test is blind to both.
    """
    draws, chunk, stream = 1 << 32, 1 << 22, NoiseStream.unsafe_reproducible(41)
    observed = dict.fromkeys((4.0, 4.5, 5.0, 5.7, 6.0, 6.5), 0)
    x = torch.empty(chunk)
    for _ in range(draws // chunk):
        size = add_noise_(x.zero_(), 1.0, stream).abs_()
        far = size[size > 4]
        for sigma in observed:
            observed[sigma] += int((far > sigma).sum())
    for sigma, count in observed.items():
        expected = 2 * float(stats.norm.sf(sigma)) * draws
        tail = min(float(stats.poisson.cdf(count, expected)), float(stats.poisson.sf(count - 1, expected)))
        assert 2 * tail > 1e-6, (sigma, count, expected)


@pytest.mark.parametrize("rounded", [False, True])
def test_a_group_gets_the_noise_of_each(rounded):
    """Whole tensors, a piece, one without noise, and rows that do not lie beside each other."""
    xs = [torch.randn(5, 3), torch.randn(4), torch.randn(7), torch.randn(2, 6).t()]
    stds, firsts = [1.0, 0.5, 0.0, 2.0], [0, 32, 0, 0]
    alone = NoiseStream.unsafe_reproducible(6)
    expected = [
        add_noise_(x.clone(), std, alone.at(3, at), secure_rounding=rounded, first=first)
        for at, (x, std, first) in enumerate(zip(xs, stds, firsts))
    ]
    drawn = NoiseStream.unsafe_reproducible(6).take_at(3, range(4))
    for run in (OPS["add_noise_group_"], OPS["add_noise_group_"].reference, torch.ops.fastdp.add_noise_group_):
        noised = [x.clone() for x in xs]
        run(noised, stds, drawn, rounded, firsts)
        assert all(map(torch.equal, noised, expected))


@cases(
    ("xs", "stds", "firsts", "error", "match"),
    [
        ([], [], [], ValueError, "at least one"),
        ([torch.zeros(3)], [1.0, 1.0], [0], ValueError, "1 xs, 2 stds"),
        ([torch.zeros(3), torch.zeros(3)], [1.0, -1.0], [0, 0], ValueError, "std"),
        ([torch.zeros(3), torch.zeros(3)], [1.0, 1e-40], [0, 0], ValueError, "secure rounding"),
        ([torch.zeros(3), torch.zeros(2)], [1.0, 1.0], [-1, 0], ValueError, "first"),
        ([torch.zeros(3), torch.zeros(1).double()], [1.0, 1.0], [0, 0], TypeError, "dense tensor"),
        ([torch.empty(1).expand((1 << 35) + 1), torch.zeros(3)], [1.0, 1.0], [0, 0], ValueError, "2\\^35"),
    ],
)
def test_of_a_group_each_is_looked_at(xs, stds, firsts, error, match):
    drawn = NoiseStream().take_at(0, range(len(xs)))
    with pytest.raises(error, match=match):
        OPS["add_noise_group_"].check(xs, stds, drawn, True, firsts)
