"""Losses and gradients of a head's logits against autograd in float64."""

import pytest
import torch
import torch.nn.functional as F

from fastdp import ops
from fastdp.ops.heads import add_product_, cuts, even_rows
from tests.cases import cases, pairs

from .uses import DTYPES

IGNORED = -7


def labelled(
    tokens: int, words: int, behind: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with columns behind those of words, targets of which some are ignored, and weights of which some are 0."""
    logits = (4 * torch.randn(tokens, words + behind)).to(dtype)
    target = torch.randint(0, words, (tokens,))
    target[::3], weights = IGNORED, torch.rand(tokens)
    weights[1::4] = 0.0
    return logits, target, weights


def require_exact(
    got: torch.Tensor, given: torch.Tensor, target: torch.Tensor, weights: torch.Tensor, losses: torch.Tensor
) -> None:
    """What logits became, and the losses, are autograd's."""
    z = given.double().requires_grad_()
    truth = F.cross_entropy(z, target, ignore_index=IGNORED, reduction="none")
    (gradient,) = torch.autograd.grad(truth, z, weights.double())
    # Triton's interpreter truncates where it rounds to bfloat16.
    rounding = 2.0**-20 + {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(given.dtype, 0.0)
    assert losses.dtype == torch.float32
    assert torch.allclose(losses.double(), truth.detach(), rtol=1e-5, atol=1e-5)
    size = gradient.abs() + weights.double().unsqueeze(1) * (z.detach().softmax(1) + 1e-6)
    assert got.shape == given.shape
    assert bool(((got.double() - gradient).abs() <= rounding * size + 2.0**-25).all())


@cases(
    *pairs(
        ("dtype", DTYPES), ("tokens, words, behind", [(1, 1, 0), (7, 129, 0), (33, 257, 15), (5, 4096, 3), (0, 9, 0)])
    )
)
def test_logits_become_their_gradient(tokens: int, words: int, behind: int, dtype: torch.dtype) -> None:
    logits, target, weights = labelled(tokens, words, behind, dtype)
    given = logits[:, :words].clone()
    losses = ops.cross_entropy_gradient_(logits, target, weights, IGNORED, words)
    require_exact(logits[:, :words], given, target, weights, losses)
    assert not logits[:, words:].any()
    # A token without a label or a weight gets exact zeros.
    assert not logits[(target == IGNORED) | (weights == 0)].any()


def test_a_token_that_is_not_finite_reaches_no_other() -> None:
    logits, target, weights = labelled(8, 65, 0, torch.float32)
    given = logits.clone()
    logits[2, 5], logits[3, 1], logits[4, 0] = float("nan"), float("inf"), float("-inf")
    target[3] = IGNORED
    losses = ops.cross_entropy_gradient_(logits, target, weights, IGNORED)
    assert losses[2].isnan()
    assert logits[2].isnan().any()
    assert not logits[3].any()
    assert logits[4].isfinite().all()
    rest = [0, 1, 5, 6, 7]
    require_exact(logits[rest], given[rest], target[rest], weights[rest], losses[rest])


@cases("shape", [(5, 3), (16, 3), (17,)])
def test_rows_behind_a_weight_are_zeros(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    even = even_rows(weight)
    assert even.shape[0] % 16 == 0
    assert even.shape[0] - shape[0] < 16
    assert torch.equal(even[: shape[0]], weight)
    assert not even[shape[0] :].any()


def test_products_are_added() -> None:
    total, left, right = torch.randn(7, 3), torch.randn(20, 7), torch.randn(20, 3)
    wanted = total.double() + left.double().T @ right.double()
    add_product_(total, left, right)
    assert torch.allclose(total.double(), wanted, rtol=1e-5, atol=1e-5)


def test_tiles_of_a_gpu_are_sixteen_times_as_large() -> None:
    weight = torch.empty(1000, 3, device="meta")
    assert cuts(10, torch.empty(1000, 3), 4000) == [(0, 4), (4, 8), (8, 10)]
    assert cuts(300, weight, 10_000)[0] == (0, 128)
    assert cuts(70, weight, 4000) == [(0, 64), (64, 70)]
    assert cuts(3, weight, 1) == [(0, 1), (1, 2), (2, 3)]


LOGITS, TARGET, WEIGHTS = torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64), torch.ones(4)


@cases(
    "logits, target, weights, words, message",
    [
        (LOGITS.T, TARGET, WEIGHTS, 4, "must be contiguous floats"),
        (LOGITS, TARGET, WEIGHTS, 7, "words is 7: it must be 1 to 6"),
    ],
)
def test_what_does_not_fit_is_refused(logits, target, weights, words: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.cross_entropy_gradient_(logits, target, weights, IGNORED, words)
