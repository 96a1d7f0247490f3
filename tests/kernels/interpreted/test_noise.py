"""Noise in Triton equals the definition within rounding; AdamW and the clip with it."""

import decimal
from decimal import Decimal

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from fastdp.kernels.adamw import adamw_noise_steps_
from fastdp.kernels.chacha import chacha_words, radius_squared, turn, wide_radius_squared
from fastdp.kernels.choice import uniforms
from fastdp.kernels.clip import clip_noise, clip_noise_backward
from fastdp.kernels.grid import exact_normal as device_exact_normal
from fastdp.kernels.noise import add_noise_

from fastdp import ops
from fastdp.ops.grid import exact_normal, on_grid
from fastdp.ops.noise import normal_parts, standard_normals
from fastdp.ops.stream import CIPHER_ROUNDS, chacha_words as defined_words
from fastdp.ops.table import OPS
from tests.cases import pairs
from tests.ops.noise_paths import NORMAL_ERROR, open_sums

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Half a unit in the last place, relative.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def position(rounds=20):
    return ops.NoiseStream.unsafe_reproducible(5, rounds).at(2**33 + 7, 77).take()


@triton.jit
def words_kernel(p_position, p_first, p_last, first, flag, b: tl.constexpr):
    block = first.to(tl.uint32) + tl.arange(0, b).to(tl.uint32)
    low, high = chacha_words(p_position, block, flag.to(tl.uint32))
    o = tl.arange(0, b)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(p_first + o, low.to(tl.int32, bitcast=True))
    tl.store(p_last + o, high.to(tl.int32, bitcast=True))


@triton.jit
def parts_kernel(p_word, p_second, p_plain, p_wide, p_cos, p_sin, b: tl.constexpr):
    o = tl.arange(0, b)
    word = tl.load(p_word + o).to(tl.uint32, bitcast=True)
    second = tl.load(p_second + o).to(tl.uint32, bitcast=True)
    tl.store(p_plain + o, radius_squared(word))
    tl.store(p_wide + o, wide_radius_squared(word, second))
    cosine, sine = turn(word)
    tl.store(p_cos + o, cosine)
    tl.store(p_sin + o, sine)


@pytest.mark.parametrize(*pairs(("rounds", CIPHER_ROUNDS), ("first", [0, 2**32 - 16]), ("second", [False, True])))
def test_words_are_those_of_the_definition(first, second, rounds):
    low, high = torch.empty(16, 8, dtype=torch.int32), torch.empty(16, 8, dtype=torch.int32)
    words_kernel[(1,)](position(rounds), low, high, first, (1 << 31) if second else 0, b=16)
    words = np.concatenate([low.numpy(), high.numpy()], axis=1).view(np.uint32)
    assert np.array_equal(words, defined_words(position(rounds), first, 16, second))


def test_radius_and_angle_at_the_edges():
    edges = [
        0,
        1,
        2,
        65535,
        65536,
        2**23,
        2**24 + 1,
        2**29 - 1,
        2**29,
        2**31 - 1,
        2**31,
        2**31 + 1,
        2**32 - 2,
        2**32 - 1,
    ]
    rng = np.random.default_rng(0)
    word = np.array(edges + rng.integers(0, 2**32, 256 - len(edges)).tolist(), dtype=np.uint64).astype(np.uint32)
    second = np.concatenate([[0], rng.integers(0, 2**32, 255)]).astype(np.uint32)
    plain, wide, cosine, sine = (torch.empty(256) for _ in range(4))
    as_int = [torch.from_numpy(w.view(np.int32)) for w in (word, second)]
    parts_kernel[(1,)](*as_int, plain, wide, cosine, sine, b=256)
    radius, angle = normal_parts(word, second, word)
    got = np.where(word < 65536, wide.double().sqrt().numpy(), plain.double().sqrt().numpy())
    assert np.abs(got / radius - 1).max() <= NORMAL_ERROR
    assert radius.max() > 9.4
    assert np.abs(cosine.numpy() - np.cos(angle)).max() <= NORMAL_ERROR
    assert np.abs(sine.numpy() - np.sin(angle)).max() <= NORMAL_ERROR


@pytest.mark.parametrize(("rounds", "block", "k"), [(20, 71500421, 6), (12, 123700073, 0)])
def test_tails_are_widened(rounds, block, k):
    """Blocks with a radius word whose top 16 bits are zero, found by search."""
    at = ops.NoiseStream.unsafe_reproducible(0, rounds).at(0, 0).take()
    z, truth = torch.zeros(16), standard_normals(at, 16, 16 * block).view(2, 8)
    add_noise_(z, 1.0, at, False, 16 * block)
    radius = truth.norm(dim=0)
    assert radius[k] > 6.2
    assert bool(((z.view(2, 8).double() - truth).abs() <= 2 * NORMAL_ERROR * radius).all())


@triton.jit
def exact_kernel(p_position, p_high, p_low, b: tl.constexpr):
    o = tl.arange(0, 16 * b)
    high, low = device_exact_normal(p_position, (o // 16).to(tl.uint32), o % 16)
    tl.store(p_high + o, high)
    tl.store(p_low + o, low)


def test_exact_normals():
    high, low = torch.empty(64, dtype=torch.float64), torch.empty(64, dtype=torch.float64)
    exact_kernel[(1,)](position(), high, low, b=4)
    with decimal.localcontext() as context:
        context.prec = 60
        for i in range(64):
            truth = exact_normal(position(), i)
            assert abs(Decimal(float(high[i])) + Decimal(float(low[i])) - truth) <= Decimal(2) ** -98 * abs(truth)


@pytest.mark.parametrize(("std", "rounds"), [(0.7, 20), (3.0, 20), (0.7, 12)])
def test_rounded_sums_are_those_of_the_definition(std, rounds):
    """Sums beside a middle of the grid among them, where float32 decides nothing and float64 not always."""
    x = torch.cat([torch.zeros(2048), 1e4 * torch.randn(2048), open_sums(position(rounds), 2048 + 13, std)])
    got = x.clone()
    add_noise_(got, std, position(rounds), True)
    assert torch.equal(got, on_grid(x, std, position(rounds)))


@pytest.mark.parametrize("rounds", CIPHER_ROUNDS)
def test_other_kernels_round_as_the_definition(rounds):
    param, moments = torch.randn(257, 3), (torch.randn(257, 3), torch.randn(257, 3), torch.rand(257, 3))
    numbers = (0.7, 8.0, 1e-2, 0.9, 0.999, 1e-8, 0.1, 5, True)
    got, truth = ([param.clone(), *(m.clone() for m in moments)] for _ in range(2))
    adamw_noise_steps_(*[[x] for x in got], [], position(rounds)[None], *numbers, [], [])
    OPS["adamw_noise_steps_"].reference(*[[x] for x in truth], [], position(rounds)[None], *numbers, [], [])
    for x, y in zip(got, truth):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    x = 0.01 * torch.randn(5, 129)  # not clipped, so that both round the same numbers
    assert torch.equal(clip_noise(x, 10.0, 0.5, position(rounds), True)[0], on_grid(x, 0.5, position(rounds)))


@pytest.mark.parametrize(
    *pairs(("shape", [(3, 7), (2, 129, 17), (1, 2500), (5, 1), (4, 0), (0, 3)]), ("dtype", DTYPES))
)
def test_clip_noise_and_its_gradient(shape, dtype):
    x, grad = (3 * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)
    if shape[0] > 2 and x.numel():
        x[1].view(-1)[0] = float("nan")
        x[2].view(-1)[-1] = float("inf")
    got, norm = clip_noise(x, 2.0, 0.5, position(), False)
    truth, true_norm = OPS["clip_noise"].reference(x, 2.0, 0.5, position(), False)
    finite = true_norm.isfinite()
    torch.testing.assert_close(norm[finite], true_norm[finite], rtol=1e-12, atol=0.0)
    assert torch.equal(norm.isfinite(), finite)
    torch.testing.assert_close(got, truth, rtol=2 * ROUNDING[dtype], atol=1e-6)
    back = clip_noise_backward(grad, x, true_norm, 2.0)
    torch.testing.assert_close(
        back, OPS["clip_noise_backward"].reference(grad, x, true_norm, 2.0), rtol=2 * ROUNDING[dtype], atol=1e-6
    )


def test_uniforms_of_tokens():
    words = defined_words(position(), 0, 64 * 300)[::64, :2].astype(np.float64)
    truth = (words[:, 1] * 2.0**32 + words[:, 0] + 0.5) * 2.0**-64
    assert np.abs(uniforms(position(), 300, torch.device("cpu")).numpy() - truth).max() <= 2.0**-52
