"""Per-example clip and noise: the definition, its gradient, and what it refuses."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st

from fastdp import ops
from fastdp.ops.grid import grid
from fastdp.ops.noise import standard_normals
from tests.cases import cases, pairs
from tests.ops.noise_paths import DTYPES, NORMAL_ERROR
from tests.ops.uses import stream

#: Float32 noise as it is, not rounded to a grid (that has tests of its own).
clip_noise = partial(ops.clip_noise, secure_rounding=False)

SHAPES = [(1, 1), (1,), (5,), (7, 129), (3, 7, 11), (129, 1), (33, 64), (2, 257, 123), (1, 20_001), (0, 4), (4, 0)]


def noise(shape: tuple[int, ...]) -> torch.Tensor:
    return standard_normals(stream().take(), math.prod(shape)).reshape(shape)


def composed(x: torch.Tensor, max_norm: float, std: float, z: torch.Tensor) -> torch.Tensor:
    """The formula in torch, for autograd to differentiate."""
    norm = torch.linalg.vector_norm(x.reshape(x.shape[0], math.prod(x.shape[1:])), dim=1)
    factor = (max_norm / norm).clamp(max=1.0)
    return x * factor.reshape(-1, *[1] * (x.dim() - 1)) + std * z


@cases(*pairs(("secure", [False, True]), ("dtype", DTYPES), ("shape", SHAPES)))
def test_forward_and_gradient_against_float64(shape, dtype, secure):
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator).to(dtype)
    g = torch.randn(shape, generator=generator).to(dtype)
    max_norm = 0.8 * math.sqrt(max(1, math.prod(shape[1:])))  # about half of the examples are longer
    z = noise(shape)
    x64 = x.double().requires_grad_()
    truth = composed(x64, max_norm * (1 - 2**-21), 0.6, z)  # no row is longer than the bound after rounding
    truth.backward(g.double())

    ours = x.clone().requires_grad_()
    y = clip_noise(ours, max_norm, 0.6, stream(), secure_rounding=secure)
    y.backward(g)
    assert y.dtype == ours.grad.dtype == dtype
    eps, half = torch.finfo(dtype).eps, 2.0**-24
    tiny = torch.finfo(dtype).smallest_normal * eps  # the step of subnormals
    bound = 0.6 * (NORMAL_ERROR + 2 * half) * z.abs() + 3 * half * x.abs() + tiny
    bound += 1.001 * (half + eps / 2) * truth.abs() + secure * (0.5 + eps) * grid(0.6)[0]
    shorter = 2.0**-22  # what is taken off a clipped row beyond the bound, so that rounding never leaves it longer
    bound += shorter * x.abs()
    assert ((y.double() - truth).abs() <= bound).all()
    # the gradient's two terms are each rounded three times in float32, their difference once more in the dtype
    norm = torch.linalg.vector_norm(x.double().reshape(shape[0], math.prod(shape[1:])), dim=1)
    along = (g.double() * x.double()).reshape(shape[0], math.prod(shape[1:])).sum(1).abs() / norm.square().clamp_min(
        1e-30
    )
    pulled = along.reshape(-1, *[1] * (len(shape) - 1)) * x.double().abs()
    limit = (4 * half + shorter) * (g.double().abs() + pulled) + eps / 2 * 1.001 * x64.grad.abs() + tiny
    assert ((ours.grad.double() - x64.grad).abs() <= limit).all()


@cases(*pairs(("length", [9, 100]), ("bad", [float("nan"), float("inf")])))
def test_an_example_that_is_not_finite_becomes_noise_alone(bad, length):
    x = torch.randn(5, length)
    x[2, 3] = bad
    x.requires_grad_()
    y = clip_noise(x, 1.0, 0.5, stream())
    y.backward(torch.ones_like(y))
    z = noise((5, length))
    torch.testing.assert_close(y[2].double(), 0.5 * z[2], rtol=1e-6, atol=0)
    assert y.isfinite().all()
    assert x.grad[2].eq(0).all()
    assert x.grad.isfinite().all()
    assert x.grad[[0, 1, 3, 4]].ne(0).any(dim=1).all()


@cases("std", [0.0, 1.0])
def test_zero_examples_have_no_direction_and_get_a_plain_gradient(std):
    x = torch.zeros(3, 70, requires_grad=True)
    y = clip_noise(x, 1.0, std, stream())
    y.backward(torch.ones_like(y))
    assert y.isfinite().all()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_the_noise_is_that_of_the_flattened_position():
    """The same position through another shape, row length and batch split gives the same noise."""
    flat = clip_noise(torch.zeros(1, 6006), 1.0, 1.0, stream())
    for shape in ((6006, 1), (143, 42), (42, 143), (6, 7, 143)):
        assert torch.equal(clip_noise(torch.zeros(shape), 1.0, 1.0, stream()).reshape(1, -1), flat)


def test_strided_inputs():
    x = torch.randn(40, 9).t()
    g = torch.randn(40, 9).t()
    for view in (x, x[:, ::3]):
        a, b = view.detach().requires_grad_(), view.contiguous().requires_grad_()
        grad = g[:, : view.shape[1]]
        y = clip_noise(a, 1.0, 0.3, stream())
        y.backward(grad)
        expected = clip_noise(b, 1.0, 0.3, stream())
        expected.backward(grad.contiguous())
        assert y.is_contiguous()
        assert torch.equal(y, expected)
        assert torch.equal(a.grad, b.grad)


def test_no_gradient_is_recorded_without_need():
    assert not clip_noise(torch.randn(3, 4), 1.0, 1.0, stream()).requires_grad
    with torch.no_grad():
        assert not clip_noise(torch.randn(3, 4, requires_grad=True), 1.0, 1.0, stream()).requires_grad


def test_compiled_forward_and_backward():
    at, twin = stream(), stream()

    @torch.compile(backend="aot_eager")
    def layer(x):
        return clip_noise(x * 2, 1.0, 0.5, at) * 3

    for _ in range(3):
        x = torch.randn(4, 6, requires_grad=True)
        x2 = x.detach().clone().requires_grad_()
        y, expected = layer(x), clip_noise(x2 * 2, 1.0, 0.5, twin) * 3
        y.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(y, expected, rtol=0, atol=0)
        torch.testing.assert_close(x.grad, x2.grad)


@cases(
    "x, max_norm, std, error, sentence",
    [
        (torch.zeros(2, 3), 0.0, 1.0, ValueError, "max_norm must be a finite number of at least 7.88"),
        (torch.zeros(2, 3), -1.0, 1.0, ValueError, "max_norm must be a finite number"),
        (torch.zeros(2, 3), float("nan"), 1.0, ValueError, "max_norm must be a finite number"),
        (torch.zeros(2, 3), 1.0, -1.0, ValueError, "std must be a finite number"),
        (torch.zeros(()), 1.0, 1.0, ValueError, "first dimension of examples"),
    ],
)
def test_bad_arguments(x, max_norm, std, error, sentence):
    at = stream()
    with pytest.raises(error, match=sentence):
        clip_noise(x, max_norm, std, at)
    assert torch.equal(at.take(), stream().take())


@given(
    seed=st.integers(0, 10**6), width=st.integers(1, 300), exponent=st.floats(-38, 38), max_norm=st.floats(1e-30, 1e30)
)
def test_no_row_is_longer_than_the_bound(seed, width, exponent, max_norm):
    """In float64, with nothing forgiven: the factor and the product are rounded, and the bound is kept all the same."""
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(seed)) * 10**exponent
    got = clip_noise(x, max_norm, 0.0, stream())
    assert float(got.double().norm(dim=1).max()) <= max_norm
    short = x.double().norm(dim=1) <= max_norm * (1 - 2.0**-20)
    assert torch.equal(got[short], x[short])
