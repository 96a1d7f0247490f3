"""AdamW with noise in one pass, against torch's AdamW given the same noise."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from fastdp import ops
from fastdp.ops.grid import on_grid
from fastdp.ops.noise import standard_normals
from fastdp.ops.table import definitions
from tests.cases import cases, pairs
from tests.ops.noise_paths import DTYPES, ODD_SHAPES
from tests.ops.uses import stream

#: Float32 noise as it is, not rounded to a grid (that has tests of its own).
adamw_noise_step_ = partial(ops.adamw_noise_step_, secure_rounding=False)

HYPER = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}


def torch_steps(param: torch.Tensor, sums: list[torch.Tensor], dtype: torch.dtype, secure: bool = False):
    """Torch's AdamW in ``dtype`` on the noised means; the noise is the definition's."""
    at = stream()
    w = torch.nn.Parameter(param.to(dtype))
    optimizer = torch.optim.AdamW([w], **HYPER)
    for total in sums:
        if secure:
            noised = on_grid(total, 0.7, at.take()).double()
        else:
            noised = total.double() + 0.7 * standard_normals(at.take(), w.numel()).reshape(w.shape)
        w.grad = (noised / 32.0).to(dtype)
        optimizer.step()
    state = optimizer.state[w]
    return w.detach(), state["exp_avg"], state["exp_avg_sq"]


def our_steps(param: torch.Tensor, sums: list[torch.Tensor], **options):
    at, mean, square = stream(), torch.zeros(param.shape), torch.zeros(param.shape)
    for i, total in enumerate(sums):
        adamw_noise_step_(param, total, mean, square, 0.7, at, divisor=32.0, step=i + 1, **HYPER, **options)
    return param, mean, square


@cases(*pairs(("secure", [False, True]), ("shape", ODD_SHAPES)))
def test_three_steps_against_torch(shape, secure):
    """Within twice the error of torch's own float32 AdamW on the same noise, both measured from float64."""
    generator = torch.Generator().manual_seed(1)
    param = torch.randn(shape, generator=generator)
    sums = [8 * torch.randn(shape, generator=generator) for _ in range(3)]
    kept = [s.clone() for s in sums]
    ours = our_steps(param.clone(), sums, secure_rounding=secure)
    truth = torch_steps(param, sums, torch.float64, secure)
    same = torch_steps(param, sums, torch.float32, secure)
    for a, t, b in zip(ours, truth, same):
        if t.numel():
            error, allowed = (a.double() - t).abs().max(), (b.double() - t).abs().max()
            # one float32 rounding of the largest entry is allowed where torch's error happens to be nothing
            assert error <= 2 * allowed + 2.0**-24 * t.abs().max()
    assert all(torch.equal(a, b) for a, b in zip(sums, kept)), "the sum was changed"


@cases("dtype", DTYPES[1:])
def test_low_precision_parameters_are_rounded_once(dtype):
    generator = torch.Generator().manual_seed(2)
    param = torch.randn(1001, generator=generator).to(dtype)
    sums = [torch.randn(1001, generator=generator)]
    ours, *moments = our_steps(param.clone(), sums)
    exact, *expected = our_steps(param.float(), sums)
    assert torch.equal(ours, exact.to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(moments, expected))


AXES = [(torch.float32, (37, 61), 37), (torch.bfloat16, (5, 3, 7), 5), (torch.float32, (9,), 9)]


@pytest.mark.parametrize("kernels", [nullcontext, definitions])
@cases("dtype, shape, rows", AXES)
def test_axes_scale_sum_and_noise(dtype, shape, rows, kernels):
    """As a step on the noised mean times the axes, whose noise has a variance of its own at each coordinate."""
    generator = torch.Generator().manual_seed(5)
    param, total = torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator)
    mean, square = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
    a, b = (10 ** (2 * torch.rand(k, generator=generator) - 1) for k in (rows, param.numel() // rows))
    s, std, divisor, step = torch.outer(a, b).view(shape).double(), 0.7, 4.0, 5
    g = (total.double() + std * standard_normals(stream().take(), param.numel()).view(shape)) / divisor * s
    m, v = 0.9 * mean.double() + 0.1 * g, 0.99 * square.double() + 0.01 * g**2
    under = (v / (1 - 0.99**step)).sqrt() + 1e-6
    expected = param.double() * (1 - 3e-3 * 0.1) - 3e-3 * m / (1 - 0.9**step) / under
    got, plain, even = ([x.clone() for x in (param, mean, square)] for _ in range(3))
    numbers, ones = {"divisor": divisor, "step": step, **HYPER}, (torch.ones(rows), torch.ones(param.numel() // rows))
    with kernels():
        for own, axes in ((got, (a, b)), (plain, (None, None)), (even, ones)):
            adamw_noise_step_(own[0], total, *own[1:], std, stream(), rows=axes[0], columns=axes[1], **numbers)
    # A few roundings of float32, of which the cancellation under the root makes more.
    for found, wanted in zip(got[1:], (m, v)):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(got[0].double(), expected, rtol=2e-6 if dtype == torch.float32 else 2**-8, atol=2e-5)
    # All ones are no axes.
    assert all(torch.equal(x, y) for x, y in zip(plain, even))


def test_nothing_next_to_the_tensors_is_written():
    for n in (1, 7, 17, 1023, 1025):
        whole = [torch.full((n + 32,), float("nan")) for _ in range(4)]
        parts = [x[16 : 16 + n] for x in whole]
        for x in parts:
            x.fill_(0.5)
        adamw_noise_step_(*parts, 1.0, stream(), divisor=2.0, lr=0.1, step=1)
        for x, part in zip(whole, parts):
            assert part.isfinite().all()
            assert x[:16].isnan().all()
            assert x[16 + n :].isnan().all()


def arguments(**changes):
    names = ("param", "grad_sum", "exp_avg", "exp_avg_sq")
    tensors = [changes.pop(name, torch.zeros(2, 3)) for name in names]
    keywords = {"std": 1.0, "stream": stream(), "divisor": 8.0, "lr": 0.1, "step": 1, **changes}
    return tensors, keywords


@cases(
    "changes, error, sentence",
    [
        ({"std": -1.0}, ValueError, "std must be"),
        ({"std": float("nan")}, ValueError, "std must be"),
        ({"divisor": 0.0}, ValueError, "divisor is 0.0: it must"),
        ({"divisor": -1.0}, ValueError, "divisor is -1.0"),
        ({"lr": float("inf")}, ValueError, "lr must be"),
        ({"betas": (1.0, 0.9)}, ValueError, "betas must be below 1"),
        ({"betas": (0.9, -0.1)}, ValueError, r"betas\[1\] must be"),
        ({"eps": -1e-8}, ValueError, "eps must be"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay must be"),
        ({"step": 0}, ValueError, "step counts from 1"),
        ({"exp_avg_sq": torch.zeros(2, 3, dtype=torch.bfloat16)}, ValueError, "moments all float32 or all bfloat16"),
        ({"exp_avg_sq": torch.zeros(2, 3, requires_grad=True)}, RuntimeError, "exp_avg_sqs? requires grad"),
        ({"param": torch.zeros(3, 2).T}, ValueError, "params must be contiguous"),
        ({"rows": torch.ones(2)}, ValueError, "rows and columns must be as many"),
        ({"rows": torch.ones(2), "columns": torch.ones(2)}, ValueError, "are no axes of a parameter of 6 elements"),
        ({"rows": torch.ones(2).double(), "columns": torch.ones(3)}, TypeError, "rows must be"),
    ],
)
def test_bad_arguments_change_nothing(changes, error, sentence):
    tensors, keywords = arguments(**changes)
    with pytest.raises(error, match=sentence):
        adamw_noise_step_(*tensors, **keywords)
    assert not any(x.any() for x in tensors if not x.is_meta)


def test_one_draw_is_no_noise_of_several_tensors():
    many = [[torch.zeros(3), torch.zeros(3)] for _ in range(4)]
    with pytest.raises(ValueError, match="serves one tensor, not 2"):
        ops.adamw_noise_steps_(*many, 1.0, stream(), divisor=8.0, lr=0.1, step=1)
    assert not any(x.any() for own in many for x in own)
